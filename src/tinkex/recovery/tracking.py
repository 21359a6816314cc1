"""The training client of a resilient loop: tracks operations, so that a checkpoint follows only successful ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tinkex.clients.training import TrainingClient
from tinkex.futures import AwaitableConcurrentFuture
from tinkex.recovery.diagnosis import is_interruption, says_run_is_gone

if TYPE_CHECKING:
    from tinkex import types
    from tinkex.clients._queue_state import Observer
    from tinkex.losses.custom import CustomLoss
    from tinkex.losses.traced import LossHandle
    from tinkex.types import Datum

__all__ = ["TrackedTraining"]

T = TypeVar("T")


class TrackedFuture(AwaitableConcurrentFuture[T]):
    """A future that records whether the program has retrieved its result."""

    def __init__(self, started: AwaitableConcurrentFuture[T], step: int) -> None:
        super().__init__(started)
        self._started = started
        self.step = step
        self.retrieved = False

    def future(self) -> Future[T]:
        """Returns this future; from then on the program handles its errors."""
        self.retrieved = True
        return super().future()

    def result(self, timeout: float | None = None) -> T:
        """Returns the result and marks it as retrieved."""
        try:
            return super().result(timeout)
        finally:
            self.retrieved = self.done()

    async def result_async(self, timeout: float | None = None) -> T:
        """Returns the result and marks it as retrieved."""
        try:
            return await super().result_async(timeout)
        finally:
            self.retrieved = self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the error and marks it as retrieved."""
        try:
            return super().exception(timeout)
        finally:
            self.retrieved = self.done()

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Adds a callback; from then on the program handles its errors."""
        self.retrieved = True
        super().add_done_callback(fn)

    def error(self) -> BaseException | None:
        """Returns the exception of a failed operation; None for pending, successful and cancelled ones."""
        return None if not self.done() or self.cancelled() else super().exception()

    async def wait(self) -> None:
        """Waits until it is done; raises nothing."""
        with contextlib.suppress(Exception):  # error() returns it
            await self._started


class TrackedTraining(TrainingClient):
    """A training client that tracks passes and steps until they have succeeded."""

    def __init__(self, client: TrainingClient) -> None:
        self.__dict__.update(client.__dict__)  # the same run, the same order of operations
        self._operations.on_queue = self._notify_queue_state
        self._pending: list[TrackedFuture[Any]] = []
        self.step = 0
        """The index of the step that operations belong to."""

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        queue_state_observer: Observer = None,
    ) -> AwaitableConcurrentFuture[types.ForwardBackwardOutput]:
        """See ``TrainingClient``."""
        return self._tracked(
            super().forward_backward(data, loss_fn, loss_fn_config, queue_state_observer=queue_state_observer)
        )

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLoss | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
        regularizers: Sequence[types.RegularizerSpec] = (),
        queue_state_observer: Observer = None,
    ) -> AwaitableConcurrentFuture[types.ForwardBackwardOutput]:
        """See ``TrainingClient``."""
        return self._tracked(
            super().forward_backward_custom(
                data,
                loss_fn,
                loss_type_input=loss_type_input,
                regularizers=regularizers,
                queue_state_observer=queue_state_observer,
            )
        )

    async def forward_backward_custom_async(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLoss | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
        regularizers: Sequence[types.RegularizerSpec] = (),
        queue_state_observer: Observer = None,
    ) -> AwaitableConcurrentFuture[types.ForwardBackwardOutput]:
        """See ``TrainingClient``."""
        return self._tracked(
            await super().forward_backward_custom_async(
                data,
                loss_fn,
                loss_type_input=loss_type_input,
                regularizers=regularizers,
                queue_state_observer=queue_state_observer,
            )
        )

    def optim_step(
        self,
        optim_params: types.AdamParams | Mapping[str, Any] | None = None,
        *,
        adam_params: types.AdamParams | None = None,
        queue_state_observer: Observer = None,
    ) -> AwaitableConcurrentFuture[types.OptimStepResponse]:
        """See ``TrainingClient``."""
        return self._tracked(
            super().optim_step(
                optim_params, adam_params=adam_params, queue_state_observer=queue_state_observer
            )
        )

    async def wait_all(self) -> None:
        """Waits for all operations so far; raises as :meth:`check` does."""
        for one in self._pending:
            await one.wait()
        self.check()

    def has_failures(self) -> bool:
        """Returns whether an operation has failed; drops those that have succeeded."""
        self._pending = [one for one in self._pending if not one.done() or one.error() is not None]
        return any(one.done() for one in self._pending)

    def check(self) -> None:
        """Raises the first failure of a finished operation that would leave a batch out of the weights unnoticed.

        A server failure always counts; a user error counts unless the program has retrieved it.
        """
        pending = []
        for one in self._pending:
            error = one.error()
            if error is None:
                if not one.done():
                    pending.append(one)
            elif is_interruption(error) or says_run_is_gone(error) or not one.retrieved:
                error.add_note(f"raised by an operation of step {one.step}")
                raise error
        self._pending = pending

    def _tracked(self, started: AwaitableConcurrentFuture[T]) -> AwaitableConcurrentFuture[T]:
        if isinstance(started, TrackedFuture):
            return started
        tracked: TrackedFuture[T] = TrackedFuture(started, self.step)
        self._pending.append(tracked)
        return tracked
