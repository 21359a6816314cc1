"""A pass whose shards are computed apart: their outputs, and the sum of their gradients in the order of the shards.

Every shard has a gradient buffer of its own, wherever it is computed, and the buffers are added in the order of their numbers.
So the sum is the same to the last bit, whichever trainers computed the shards, and in whatever order they ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinkex.engine.model.lora import Adapter
from tinkex.engine.model.threads import threads as computing_threads
from tinkex.engine.trainer.examples import Example
from tinkex.engine.trainer.optim import all_finite
from tinkex.engine.trainer.shards import ShardResult, merge_outputs
from tinkex.engine.trainer.state import TrainJob, TrainState
from tinkex.engine.trainer.trainer import Trainer
from tinkex.types.losses import ForwardBackwardOutput

__all__ = ["ShardSum", "compute_shard"]


def compute_shard(
    trainer: Trainer,
    adapter: Adapter,
    examples: Sequence[Example],
    loss_fn: str,
    *,
    backward: bool,
    share_prefixes: bool,
    threads: int = 0,
) -> ShardResult:
    """Runs some datums of a pass on an adapter, with so many threads; 0 are the usual ones. Its gradient is added to no state.

    Example:
        >>> result = compute_shard(trainer, state.adapter, examples, "ppo", backward=True, share_prefixes=True)
    """
    state = TrainState(adapter)
    job = TrainJob(state, examples, loss_fn, backward=backward)
    with computing_threads(threads):
        [output] = trainer.run([job], share_prefixes=share_prefixes)
    gradient = state.grad.numpy() if state.grad is not None else None
    return ShardResult(output, gradient, job.effort.tokens_computed)


class ShardSum:
    """The shards of one pass on a state, which changes when all are there; ``shards`` has the datums of each.

    Example:
        >>> whole = ShardSum(trainer, state, examples, "cross_entropy", plan_shards(sequences, 2), backward=True)
        >>> whole.add(1, result_of_another_trainer)
        >>> whole.compute(0)
        True
        >>> output = whole.finish()
    """

    def __init__(
        self,
        trainer: Trainer,
        state: TrainState,
        examples: Sequence[Example],
        loss_fn: str,
        shards: Sequence[Sequence[int]],
        *,
        backward: bool,
        share_prefixes: bool = True,
        threads: int = 0,
    ) -> None:
        self._trainer = trainer
        self._state = state
        self._examples = examples
        self._loss_fn = loss_fn
        self._shards = shards
        self._backward = backward
        self._share_prefixes = share_prefixes
        self._threads = threads
        self._outputs: list[ForwardBackwardOutput] = []
        self._gradient: Tensor | None = None
        self._waiting: dict[int, ShardResult] = {}
        self._own: set[int] = set()
        self.tokens_computed = 0
        """The tokens of the shards that were added."""

    def compute(self, number: int) -> bool:
        """Computes a shard here and adds it; returns False if it failed."""
        result = compute_shard(
            self._trainer,
            self._state.adapter,
            [self._examples[index] for index in self._shards[number]],
            self._loss_fn,
            backward=self._backward,
            share_prefixes=self._share_prefixes,
            threads=self._threads,
        )
        if not isinstance(result.output, ForwardBackwardOutput):
            return False
        self._own.add(number)
        self.add(number, result)
        return True

    def add(self, number: int, result: ShardResult) -> None:
        """Adds a shard; one that comes before its predecessors waits for them."""
        self._waiting[number] = result
        while (following := self._waiting.pop(place := len(self._outputs), None)) is not None:
            assert isinstance(following.output, ForwardBackwardOutput), "a shard that failed is not added"
            if following.gradient is not None:
                self._add_gradient(torch.from_numpy(following.gradient), is_own=place in self._own)
            self._outputs.append(following.output)
            self.tokens_computed += following.tokens_computed

    def _add_gradient(self, gradient: Tensor, *, is_own: bool) -> None:
        if self._gradient is not None:
            self._gradient.add_(gradient)
            if is_own:
                self._trainer.release(gradient)
        elif is_own:
            self._gradient = gradient
        else:
            # A copy, so that the sum has torch's alignment wherever the shard was computed.
            self._gradient = torch.empty_like(gradient).copy_(gradient)

    def finish(self) -> ForwardBackwardOutput | None:
        """Adds the gradient to the state, and returns the output; or None, with the state unchanged, if the sum is not finite."""
        assert len(self._outputs) == len(self._shards), "all shards were added"
        if self._gradient is not None:
            if not all_finite(self._gradient):
                return None
            if self._state.grad is None:
                self._state.grad = self._gradient
            else:
                self._state.grad.add_(self._gradient)
                self._trainer.release(self._gradient)
        return merge_outputs(self._shards, self._outputs)
