"""The interface between recipes and the training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tinkex.train.examples import Messages

if TYPE_CHECKING:
    from tinkex.clients.sampling import SamplingClient
    from tinkex.clients.service import ServiceClient
    from tinkex.clients.training import TrainingClient
    from tinkex.train.rendering import Renderer
    from tinkex.types import Datum, LossFnType

__all__ = ["Metrics", "PreparedStep", "Recipe", "RunContext", "sample_greedy"]

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class RunContext:
    """The clients, renderer and base model of a run."""

    service: ServiceClient
    training: TrainingClient
    renderer: Renderer
    base_model: str


@dataclass(frozen=True)
class PreparedStep:
    """One step, ready to submit: a pass over the data and an optimizer step; without data, neither is submitted."""

    data: Sequence[Datum]
    loss_fn: LossFnType
    metrics: Metrics
    """Metrics known before the step; without ``loss`` here, it is the sum over the data."""


class Recipe(Protocol):
    """A training method; created after the model's tokenizer is loaded."""

    headline: str
    """The metric of the plot and the progress line."""

    @property
    def num_examples(self) -> int:
        """The number of training examples."""
        ...

    @property
    def prompts(self) -> Sequence[Messages | str]:
        """Prompts for the samples before and after training."""
        ...

    def prepare(self, batch: Sequence[int], step: int) -> PreparedStep:
        """Prepares the data of one step. It may call the server, and may be interrupted at any point."""
        ...

    def evaluate(self) -> Metrics | None:
        """Evaluates the model on held-out examples; returns None if there are none."""
        ...


def sample_greedy(
    sampler: SamplingClient, renderer: Renderer, prompts: Sequence[Messages | str], max_tokens: int
) -> list[str]:
    """Returns the greedy answer to each prompt."""
    from tinkex import types

    params = types.SamplingParams(max_tokens=max_tokens, temperature=0.0)
    futures = [
        sampler.sample(types.ModelInput.from_ints(renderer.prompt(prompt)), 1, params) for prompt in prompts
    ]
    return [
        renderer.tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True).strip()
        for future in futures
    ]
