"""Compares two samplers with one, and a trainer and a sampler side by side with each of them alone, on the default model.

Every worker has one thread.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from server_side import served

import tinkex
from tinkex import types

DATUMS, LENGTH, PASSES = 8, 129, 4
PROMPT, NEW, BATCH, SAMPLES = 16, 64, 32, 128
OPTIONS = ("--trainers", "1", "--threads", "1", "--max-decode-batch", str(BATCH))


class Work:
    """Fixed amounts of training and sampling on a server."""

    def __init__(self, service: tinkex.ServiceClient, model: str) -> None:
        self._training = service.create_lora_training_client(model, rank=32, seed=1)
        self._sampling = service.create_sampling_client(base_model=model)
        self._seeds = iter(range(10**9))

    def train(self, passes: int = PASSES) -> None:
        """Passes and steps of one run."""
        data = [
            types.Datum(types.ModelInput.from_ints(t[:-1]), {"target_tokens": t[1:]}) for t in self._texts()
        ]
        pending: list[Future[Any]] = []
        for _ in range(passes):
            pending += [
                self._training.forward_backward(data, "cross_entropy"),
                self._training.optim_step(types.AdamParams(learning_rate=1e-4)),
            ]
        for each in pending:
            each.result()

    def sample(self, number: int = SAMPLES) -> None:
        """Samples of prompts that share nothing."""
        params = types.SamplingParams(max_tokens=NEW, stop=[], seed=1)
        prompts = [types.ModelInput.from_ints(self._tokens(PROMPT)) for _ in range(number)]
        for each in [self._sampling.sample(prompt, 1, params) for prompt in prompts]:
            each.result()

    def _texts(self) -> list[list[int]]:
        return [self._tokens(LENGTH) for _ in range(DATUMS)]

    def _tokens(self, length: int) -> list[int]:
        rng = random.Random(next(self._seeds))
        return [rng.randrange(100, 40_000) for _ in range(length)]


def seconds(work: Callable[[], None], beside: Callable[[], None] | None = None) -> float:
    """How long some work takes, perhaps with other work ``beside`` it all the time."""
    ended, started = threading.Event(), threading.Event()

    def repeat() -> None:
        assert beside is not None
        while not ended.is_set():
            beside()
            started.set()

    with ThreadPoolExecutor(1) as pool:
        repeated = pool.submit(repeat) if beside is not None else None
        if repeated is not None:
            started.wait()
        begin = time.perf_counter()
        work()
        elapsed = time.perf_counter() - begin
        ended.set()
        if repeated is not None:
            repeated.result()
    return elapsed


@contextmanager
def working(samplers: int, model: str) -> Iterator[Work]:
    """Work on a server with one trainer and some samplers, after a first pass and batch."""
    with (
        served(*OPTIONS, "--samplers", str(samplers), model=model) as server,
        tinkex.ServiceClient(base_url=f"http://{server.host}:{server.port}", api_key=server.key) as service,
    ):
        work = Work(service, model)
        work.train(1)
        work.sample(BATCH)
        yield work


def measure_lanes(rounds: int) -> dict[str, float]:
    """Measures each of them, the fastest of several rounds; the load of the machine is part of the result."""
    from tinkex.engine.model.catalog import DEFAULT_MODEL

    times: dict[str, list[float]] = {}
    with working(1, DEFAULT_MODEL) as one, working(2, DEFAULT_MODEL) as two:
        for _ in range(rounds):
            found = {
                "one sampler, s": seconds(one.sample),
                "two samplers, s": seconds(two.sample),
                "a trainer, s": seconds(one.train),
                "a trainer beside a sampler, s": seconds(one.train, lambda: one.sample(2 * BATCH)),
                "a sampler beside a trainer, s": seconds(one.sample, lambda: one.train(1)),
            }
            for name, elapsed in found.items():
                times.setdefault(name, []).append(elapsed)
    best = {name: min(each) for name, each in times.items()}
    return {
        **best,
        "speed, two samplers : one": best["one sampler, s"] / best["two samplers, s"],
        "speed, trainer beside a sampler : alone": best["a trainer, s"]
        / best["a trainer beside a sampler, s"],
        "speed, sampler beside a trainer : alone": best["one sampler, s"]
        / best["a sampler beside a trainer, s"],
        "load of the machine": os.getloadavg()[0],
    }
