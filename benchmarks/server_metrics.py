"""Measures what live metrics cost: CPU time of recording a step, compared with that of the step on the default model."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from tinkex.engine.store import PassEnded, StepEnded, Store

RECORDED_STEPS = 5000
TOKENS = [100 + 7 * index % 4000 for index in range(129)]
DATUMS = 8
PASS = {
    "loss:sum": 2.5,
    "num_tokens:sum": 1024.0,
    "kl_q_p:mean": 0.1,
    "clip_fraction:mean": 0.0,
    "logprob_gap:mean": 0.1,
}
STEP = {"unclipped_grad_l2:mean": 0.5, "grad_l2:mean": 0.5, "learning_rate:mean": 1e-4, "step:unique": 1.0}


def measure_metrics(steps: int) -> dict[str, float]:
    """Returns the CPU time of both, and the part that recording adds to a step."""
    recording_s, step_s = _recording_s(), _step_s(steps)
    return {
        "recording, CPU µs/step": 1e6 * recording_s,
        "step, CPU ms": 1000 * step_s,
        "CPU, recording : step": recording_s / step_s,
    }


def _recording_s() -> float:
    """The CPU time that a pass and an optimizer step add to the transactions that commit them."""
    passed = PassEnded("run", "ada", 1024, DATUMS, 1.0, PASS)
    stepped = StepEnded("run", "ada", STEP)
    total = 0.0
    with tempfile.TemporaryDirectory() as directory, Store(Path(directory)) as store:
        for _ in range(RECORDED_STEPS):
            for event in (passed, stepped):
                with store.database.transaction():
                    start = time.thread_time()
                    store.loop_metrics.record([event], time.time())
                    total += time.thread_time() - start
    return total / RECORDED_STEPS


def _step_s(steps: int) -> float:
    """The CPU time of a step of the bare engine: a pass over eight sequences of 128 tokens, and an optimizer step."""
    from tinkex.engine.config import EngineConfig
    from tinkex.engine.lanes.in_process import LocalBackend
    from tinkex.engine.lanes.interface import PassJob
    from tinkex.engine.model.catalog import DEFAULT_MODEL
    from tinkex.engine.trainer.examples import read_pass
    from tinkex.types import AdamParams, Datum, LoraConfig, ModelInput

    with tempfile.TemporaryDirectory() as data:
        backend = LocalBackend(EngineConfig(data_dir=Path(data)))
        info = backend.load(DEFAULT_MODEL)
        backend.create("run", DEFAULT_MODEL, LoraConfig(rank=32, seed=1))
        data_of_step = [
            Datum(ModelInput.from_ints([first, *TOKENS[1:-1]]), {"target_tokens": TOKENS[1:]})
            for first in range(DATUMS)
        ]
        _, examples = read_pass(data_of_step, "cross_entropy", None, info.passes)
        job = PassJob("run", "cross_entropy", examples, backward=True)
        fastest = float("inf")
        for _ in range(steps + 1):  # the first one is a warm-up
            start = time.process_time()
            assert backend.run_pass([job], share_prefixes=False) is not None
            backend.optim_step("run", AdamParams(learning_rate=1e-4))
            fastest = min(fastest, time.process_time() - start)
        backend.close()
        return fastest
