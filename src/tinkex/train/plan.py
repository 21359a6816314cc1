"""What a run would do: its examples, tokens and steps, and how long it would take, measured with one pass."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tinkex.observability.terminal.training import duration
from tinkex.train.data import TrainingData
from tinkex.train.loop import num_steps, step_batches
from tinkex.train.packing import FIRST_PLACEHOLDER, Packing, describe, pack
from tinkex.train.recipes import Progress, Recipe, collect
from tinkex.train.settings import GrpoSettings, Settings
from tinkex.train.starting import OpenModel, make_recipe, open_model

if TYPE_CHECKING:
    from tinkex.clients.service import ServiceClient

__all__ = ["TrainingPlan", "make_plan"]

PASSES = {"sft": 3, "dpo": 5, "grpo": 3}
"""The work of a step in forward passes: a backward pass counts two; DPO scores the policy and the reference first."""
MAX_PACKED_STEPS = 200
"""The packing is shown for the first steps: those that follow are alike."""


@dataclass(frozen=True)
class TrainingPlan:
    """What a run would do."""

    recipe: str
    model: str
    num_examples: int
    num_held_out: int
    num_tokens: int
    """The tokens of all steps; for GRPO with answers of the maximum length."""
    longest_example: int
    num_steps: int
    passes_per_step: int
    packing: Sequence[Packing]
    """The packing of the passes of the first steps; for GRPO with answers of the maximum length."""
    num_packed_steps: int
    seconds: float
    """The expected time of all steps, from one measured pass."""
    memory_bytes: int | None
    """The peak memory of this process so far, with the model loaded; None if the model is on a server."""

    @property
    def text(self) -> str:
        """The plan as plain text."""
        memory = (
            "on the server"
            if self.memory_bytes is None
            else f"{self.memory_bytes / 2**30:.1f} GB for the model and one pass; training adds to it"
        )
        steps = f"{self.num_steps:,}"
        if self.passes_per_step > 1:
            steps += f", each of up to {self.passes_per_step} batches whose gradients are added"
        packing = describe(self.packing)
        if self.num_packed_steps < self.num_steps:
            packing += f", in the first {self.num_packed_steps} steps"
        rows = (
            ("Model", self.model),
            ("Examples", f"{self.num_examples:,} to train on, {self.num_held_out:,} for evaluation"),
            ("Tokens", f"{self.num_tokens:,} in all steps; the longest example has {self.longest_example:,}"),
            ("Steps", steps),
            ("Packing", packing),
            ("Time", f"about {duration(self.seconds)}, without evaluation and samples"),
            ("Memory", memory),
        )  # fmt: skip
        return "\n".join(f"{name:<9} {value}" for name, value in rows) + "\nNothing was started."

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as plain values, for JSON."""
        return asdict(self)


def make_plan(
    service: ServiceClient, settings: Settings, data: TrainingData[Any], progress: Progress
) -> TrainingPlan:
    """Checks the model and the lengths of all examples, and measures one batch; creates no run."""
    model = open_model(service, settings, progress)
    recipe = make_recipe(settings, data, model.renderer)
    counts = recipe.token_counts
    steps = num_steps(settings, len(counts))
    num_packed = min(steps, MAX_PACKED_STEPS)
    num_tokens = num_groups = 0
    packing: list[Packing] = []
    for step in range(1, steps + 1):
        batches = step_batches(settings, len(counts), step)
        num_tokens += sum(counts[place] for batch in batches for place in batch)
        num_groups += sum(map(len, batches))
        if step <= num_packed:
            packing += [pack(_sequences(recipe, batch)) for batch in batches]
    first = _sequences(recipe, step_batches(settings, len(counts), 1)[0])
    per_token = _pass_seconds(model, first, progress) / sum(map(len, first))
    passes = PASSES[settings.recipe]
    seconds = 0.0
    if isinstance(settings, GrpoSettings):
        passes += settings.kl_coef > 0  # the logprobs of the reference
        seconds = num_groups * _group_seconds(model, settings, data, progress)
    seconds += per_token * num_tokens * passes
    return TrainingPlan(
        recipe=settings.recipe,
        model=model.name,
        num_examples=len(counts),
        num_held_out=len(data.held_out),
        num_tokens=num_tokens,
        longest_example=max(counts),
        num_steps=steps,
        passes_per_step=settings.accumulate,
        packing=packing,
        num_packed_steps=num_packed,
        seconds=seconds,
        memory_bytes=_peak_memory() if service.config.is_local else None,
    )


def _sequences(recipe: Recipe, batch: Sequence[int]) -> list[Sequence[int]]:
    """Returns the token sequences of a pass over a batch."""
    return [sequence for place in batch for sequence in recipe.sequences(place)]


def _pass_seconds(model: OpenModel, sequences: Sequence[Sequence[int]], progress: Progress) -> float:
    """Returns the time of a forward pass over sequences; a first one, which warms up, is not counted."""
    from tinkex import types

    (token,) = model.renderer.tokenizer.encode("a", add_special_tokens=False)[:1]
    inputs = [
        types.ModelInput.from_ints([token if one >= FIRST_PLACEHOLDER else one for one in sequence])
        for sequence in sequences
    ]
    # Another beginning, because the beginning of sequences that were computed before is cached.
    model.sampler.compute_logprobs(types.ModelInput.from_ints([token, *inputs[0].to_ints()[1:]])).result()
    began = time.monotonic()
    collect([model.sampler.compute_logprobs(one) for one in inputs], "measuring one batch", progress)
    return time.monotonic() - began


def _group_seconds(
    model: OpenModel, settings: GrpoSettings, data: TrainingData[Any], progress: Progress
) -> float:
    """Returns the time to sample one group of answers."""
    from tinkex import types

    prompt = types.ModelInput.from_ints(model.renderer.prompt(data.examples[0].prompt))
    params = types.SamplingParams(max_tokens=settings.max_tokens)
    began = time.monotonic()
    collect([model.sampler.sample(prompt, settings.group_size, params)], "measuring one group", progress)
    return time.monotonic() - began


def _peak_memory() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
