"""The interface between recipes and the training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from tinkex.train.examples import Messages

if TYPE_CHECKING:
    from tinkex.clients.sampling import SamplingClient
    from tinkex.clients.training import TrainingClient
    from tinkex.futures import APIFuture
    from tinkex.train.rendering import Renderer
    from tinkex.types import Datum, LossFnType, Rollout

__all__ = ["Metrics", "PreparedStep", "Progress", "Recipe", "RunContext", "collect", "sample_greedy"]

T = TypeVar("T")
Metrics = Mapping[str, float]
Progress = Callable[[str, int, int], None]
"""Takes the current phase, and how many of how many parts of it are done."""
ReportRollouts = Callable[[int, "Callable[[], Sequence[Rollout]]"], None]
"""Takes a step, and a function that returns what was sampled in it."""


def no_progress(phase: str, done: int, total: int) -> None:
    """Shows nothing."""


def no_rollouts(step: int, rollouts: Callable[[], Sequence[Rollout]]) -> None:
    """Reports nothing."""


@dataclass(frozen=True)
class RunContext:
    """The clients and the renderer of a run."""

    training: TrainingClient
    initial: SamplingClient
    """Samples from the model that the run starts from: the base model, or the given checkpoint."""
    renderer: Renderer
    progress: Progress = no_progress
    rollouts: ReportRollouts = no_rollouts


@dataclass(frozen=True)
class PreparedStep:
    """One step, ready to submit: a pass over each batch and an optimizer step; without data, neither is submitted."""

    passes: Sequence[Sequence[Datum]]
    """The data of each batch. The losses are summed, so their weights are divided by what all batches have together."""
    loss_fn: LossFnType
    metrics: Metrics
    """Metrics known before the step; without ``loss`` here, it is the sum over the data."""


class Recipe(Protocol):
    """A training method; created from data and tokenizer, before the run exists on the server."""

    headline: str
    """The metric of the plot and the progress line."""

    @property
    def token_counts(self) -> Sequence[int]:
        """The number of tokens that each training example takes in one step."""
        ...

    @property
    def prompts(self) -> Sequence[Messages | str]:
        """Prompts for the samples before and after training, held-out ones first."""
        ...

    def sequences(self, place: int) -> Sequence[Sequence[int]]:
        """The token sequences that a training example adds to a pass; unknown tokens are :func:`placeholders`."""
        ...

    def prepare(self, context: RunContext, batches: Sequence[Sequence[int]], step: int) -> PreparedStep:
        """Prepares the data of one step. It may call the server, and may be interrupted at any point."""
        ...

    def evaluate(self, context: RunContext) -> Metrics | None:
        """Evaluates the model on held-out examples; returns None if there are none."""
        ...


def collect(futures: Sequence[APIFuture[T]], phase: str, progress: Progress) -> list[T]:
    """Waits for all results in order and reports how many have arrived.

    >>> from tinkex.futures import AwaitableConcurrentFuture
    >>> done: AwaitableConcurrentFuture[int] = AwaitableConcurrentFuture()
    >>> done.set_result(3)
    >>> collect([done], "counting", print)
    counting 0 1
    counting 1 1
    [3]
    """
    progress(phase, 0, len(futures))
    results = []
    for number, future in enumerate(futures, 1):
        results.append(future.result())
        progress(phase, number, len(futures))
    return results


def sample_greedy(
    sampler: SamplingClient,
    renderer: Renderer,
    prompts: Sequence[Messages | str],
    max_tokens: int,
    *,
    phase: str = "sampling",
    progress: Progress = no_progress,
) -> list[str]:
    """Returns the greedy answer to each prompt."""
    from tinkex import types

    params = types.SamplingParams(max_tokens=max_tokens, temperature=0.0)
    futures = [
        sampler.sample(types.ModelInput.from_ints(renderer.prompt(prompt)), 1, params) for prompt in prompts
    ]
    return [
        renderer.tokenizer.decode(response.sequences[0].tokens, skip_special_tokens=True).strip()
        for response in collect(futures, phase, progress)
    ]
