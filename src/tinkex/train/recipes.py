"""What a recipe is, and what the loop needs of it."""

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

__all__ = ["Metrics", "Place", "Recipe", "Work", "greedy"]

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Place:
    """Where a recipe works: the clients of a run and how texts become tokens."""

    service: ServiceClient
    training: TrainingClient
    renderer: Renderer
    base_model: str


@dataclass(frozen=True)
class Work:
    """One step, ready to be sent: a pass over the data and a step of the optimizer; without data there is neither."""

    data: Sequence[Datum]
    loss_fn: LossFnType
    metrics: Metrics
    """What is known before the step; ``loss`` is the sum over the data where it is not given here."""


class Recipe(Protocol):
    """One way to train; made once the model's tokenizer is known."""

    headline: str
    """The metric that is plotted and shown live."""

    @property
    def num_examples(self) -> int:
        """How many examples there are to train on."""
        ...

    @property
    def prompts(self) -> Sequence[Messages | str]:
        """Prompts that show what the model has learned."""
        ...

    def prepare(self, batch: Sequence[int], step: int) -> Work:
        """Finds out what one step trains on. It may ask the server, and may be stopped at any point."""
        ...

    def evaluate(self) -> Metrics | None:
        """How the model does on the examples it is not trained on; None where there are none."""
        ...


def greedy(
    sampler: SamplingClient, renderer: Renderer, prompts: Sequence[Messages | str], max_tokens: int
) -> list[str]:
    """The likeliest answer to each prompt."""
    from tinkex import types

    params = types.SamplingParams(max_tokens=max_tokens, temperature=0.0)
    asked = [
        sampler.sample(types.ModelInput.from_ints(renderer.prompt(prompt)), 1, params) for prompt in prompts
    ]
    return [
        renderer.tokenizer.decode(answer.result().sequences[0].tokens, skip_special_tokens=True).strip()
        for answer in asked
    ]
