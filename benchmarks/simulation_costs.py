"""What the jobs of a lane take, for the simulation: measured on this machine, or derived from published figures."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

CACHE = Path(__file__).with_name("data") / "simulation_costs.json"


@dataclass(frozen=True)
class Costs:
    """Seconds: of a decode step, of a prefill, of a pass and of an optimizer step, each linear in what it processes."""

    name: str
    source: str
    is_estimate: bool
    decode_step_s: float
    decode_sequence_s: float
    """Of each sequence of a step, besides the step's own."""
    prefill_token_s: float
    pass_s: float
    train_token_s: float
    optim_step_s: float
    save_s: float
    max_decode_batch: int
    max_tokens_per_pass: int

    def decode_s(self, num_sequences: int) -> float:
        """A decode step of so many sequences."""
        return self.decode_step_s + self.decode_sequence_s * num_sequences

    def sample_s(self, prompt_tokens: float, new_tokens: float) -> float:
        """The time of a lane that a sequence takes in a full batch."""
        share = self.decode_s(self.max_decode_batch) / self.max_decode_batch
        return prompt_tokens * self.prefill_token_s + new_tokens * share


H100 = Costs(
    name="H100, Llama 3.1 8B",
    source=(
        "TensorRT-LLM performance overview (Llama 3.1 8B FP8, one H100: 22,714 tokens/s at 128/2048, 3,450 at 2048/128), "
        "solved for a prompt token and a new token; a step reads 8 GB of weights at 3.35 TB/s; "
        "torchtitan (Llama 3.1 8B, 8 H100, FSDP and torch.compile: 6,667 tokens/s per GPU)"
    ),
    is_estimate=True,
    decode_step_s=8.0e9 / 3.35e12,
    decode_sequence_s=4.3e-5 - 8.0e9 / 3.35e12 / 256,
    prefill_token_s=1.54e-5,
    pass_s=0.005,
    train_token_s=1 / 6667,
    optim_step_s=0.002,
    save_s=0.05,
    max_decode_batch=256,
    max_tokens_per_pass=16_384,
)
"""One GPU is a lane. The optimizer step and the save of an adapter, and what a pass takes besides its tokens, are assumed."""

PRESETS = {"h100": H100}


def this_machine(*, again: bool = False) -> Costs:
    """The costs of this machine, from the file of measurements, or measured now."""
    known = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    name = machine_name()
    if name not in known or again:
        known[name] = asdict(measure())
        CACHE.write_text(json.dumps(known, indent=1) + "\n")
    return Costs(**known[name])


def recorded() -> Sequence[Costs]:
    """The costs of every machine that was measured."""
    return [Costs(**each) for each in json.loads(CACHE.read_text()).values()] if CACHE.exists() else []


def machine_name() -> str:
    """The processor, and how many cores there are."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def measure(rounds: int = 3) -> Costs:
    """Measure the default model with the real trainer and sampler, in CPU time of one thread: other load changes it least."""
    import torch
    from engine_sides import Ours, datum, finish, random_tokens

    from tinkex import types
    from tinkex.engine.model.catalog import DEFAULT_MODEL

    torch.set_num_threads(1)
    ours = Ours()
    state = ours.state()

    def train(num_datums: int) -> float:
        data = [datum(128, seed) for seed in range(num_datums)]
        return _best(rounds, lambda: ours.forward_backward([(state, data)]))

    small, large = train(2), train(16)
    token_s = max((large - small) / (14 * 128), 1e-9)

    def sample(num_sequences: int, prompt: int, new: int) -> float:
        def run() -> None:
            sampler = ours.sampler()
            for seed in range(num_sequences):
                sampler.add(ours.job(random_tokens(prompt, seed), new))
            finish(sampler)

        return _best(rounds, run)

    prompts = sample(1, 512, 1), sample(1, 64, 1)
    prefill_s = max((prompts[0] - prompts[1]) / 448, 1e-9)
    one = (sample(1, 32, 33) - sample(1, 32, 1)) / 32
    many = (sample(32, 32, 33) - sample(32, 32, 1)) / 32
    params = types.AdamParams(learning_rate=1e-5)

    def step() -> None:
        ours.forward_backward([(state, [datum(16, 0)])])

    def both() -> None:
        step()
        ours.trainer.optim_step(state, params)

    optim_s = max(_best(rounds, both) - _best(rounds, step), 1e-4)
    return Costs(
        name=f"one core of {machine_name()}, {DEFAULT_MODEL.rsplit('/', 1)[-1]}",
        source=f"measured {time.strftime('%Y-%m-%d')} with the trainer and the sampler, in CPU time",
        is_estimate=False,
        decode_step_s=max(one - (many - one) / 31, 1e-4),
        decode_sequence_s=max((many - one) / 31, 1e-6),
        prefill_token_s=prefill_s,
        pass_s=max(small - 2 * 128 * token_s, 1e-4),
        train_token_s=token_s,
        optim_step_s=optim_s,
        save_s=optim_s,
        max_decode_batch=64,
        max_tokens_per_pass=2048,
    )


def _best(rounds: int, run: Callable[[], object]) -> float:
    times = []
    for _ in range(rounds + 1):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times[1:])
