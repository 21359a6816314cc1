"""The run of a resilient loop: what changes its weights is known to have succeeded before a checkpoint says so."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tinkex.clients.training import TrainingClient
from tinkex.futures import APIFuture, AwaitableConcurrentFuture
from tinkex.recovery.diagnosis import is_interruption, says_run_is_gone

if TYPE_CHECKING:
    from tinkex import types
    from tinkex.losses.custom import CustomLoss
    from tinkex.losses.traced import LossHandle
    from tinkex.types import Datum

__all__ = ["TrackedTraining"]

T = TypeVar("T")


class Tracked(AwaitableConcurrentFuture[T]):
    """A future that remembers whether the program has looked at its outcome."""

    def __init__(self, future: Future[T], step: int) -> None:
        super().__init__(future)
        self.step = step
        self.seen = False

    def result(self, timeout: float | None = None) -> T:
        """The result; the program knows it from here on."""
        try:
            return super().result(timeout)
        finally:
            self.seen = self.done()

    async def result_async(self, timeout: float | None = None) -> T:
        """The result; the program knows it from here on."""
        try:
            return await super().result_async(timeout)
        finally:
            self.seen = self.done()

    def future(self) -> Future[T]:
        """The underlying future, which is the program's own business."""
        self.seen = True
        return super().future()

    def error(self) -> BaseException | None:
        """Why it failed, if it is done and did; what the program cancelled is its own business."""
        underlying = super().future()
        return None if not underlying.done() or underlying.cancelled() else underlying.exception()

    async def ended(self) -> None:
        """Waits for it, whatever comes of it."""
        with contextlib.suppress(Exception):  # error() gives it to whoever asks
            await super().result_async()


class TrackedTraining(TrainingClient):
    """A training client that keeps count of passes and steps until they are known to have succeeded."""

    def __init__(self, client: TrainingClient) -> None:
        self.__dict__.update(client.__dict__)  # the same run, the same order of operations
        self._operations.on_queue = self._hear_queue
        self._unsettled: list[Tracked[Any]] = []
        self.step = 0
        """The step that operations belong to."""

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """As of every training client."""
        return self._tracked(super().forward_backward(data, loss_fn, loss_fn_config))

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLoss | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
        regularizers: Sequence[types.RegularizerSpec] = (),
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """As of every training client."""
        return self._tracked(
            super().forward_backward_custom(
                data, loss_fn, loss_type_input=loss_type_input, regularizers=regularizers
            )
        )

    async def forward_backward_custom_async(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLoss | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
        regularizers: Sequence[types.RegularizerSpec] = (),
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """As of every training client."""
        return self._tracked(
            await super().forward_backward_custom_async(
                data, loss_fn, loss_type_input=loss_type_input, regularizers=regularizers
            )
        )

    def optim_step(
        self,
        optim_params: types.AdamParams | Mapping[str, Any] | None = None,
        *,
        adam_params: types.AdamParams | None = None,
    ) -> APIFuture[types.OptimStepResponse]:
        """As of every training client."""
        return self._tracked(super().optim_step(optim_params, adam_params=adam_params))

    async def settle(self) -> None:
        """Waits for everything called so far; raises what :meth:`check` does."""
        for one in self._unsettled:
            await one.ended()
        self.check()

    def has_failures(self) -> bool:
        """Whether something has ended badly; what has ended well is forgotten."""
        self._unsettled = [one for one in self._unsettled if not one.done() or one.error() is not None]
        return any(one.done() for one in self._unsettled)

    def check(self) -> None:
        """Raises the first failure among what has ended that leaves the weights without a batch unawares.

        A failure of the server's always does. One of the program's own making does unless the program has seen it.
        """
        unsettled = []
        for one in self._unsettled:
            error = one.error()
            if error is None:
                if not one.done():
                    unsettled.append(one)
            elif is_interruption(error) or says_run_is_gone(error) or not one.seen:
                error.add_note(f"raised by an operation of step {one.step}")
                raise error
        self._unsettled = unsettled

    def _tracked(self, started: APIFuture[T]) -> APIFuture[T]:
        if isinstance(started, Tracked):
            return started
        assert isinstance(started, AwaitableConcurrentFuture)
        tracked: Tracked[T] = Tracked(started.future(), self.step)
        self._unsettled.append(tracked)
        return tracked
