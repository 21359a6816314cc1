"""One step of a resilient training: the batch, the run to train, and a block that may be interrupted."""

from __future__ import annotations

import math
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from tinkex.recovery.diagnosis import is_interruption, says_run_is_gone

if TYPE_CHECKING:
    from tinkex.clients.training import TrainingClient

__all__ = ["Step"]

B = TypeVar("B")


class Step(Generic[B]):
    """A batch and the run to apply it to; use it in a ``with`` block, in which the whole step happens.

    A failure of the server or the way to it inside the block is taken care of: the block ends there, and the
    loop goes on from the last checkpoint. Every other error is yours. The first Ctrl-C lets the block finish and a
    checkpoint be saved; the second ends it at once.
    """

    def __init__(self, index: int, batch: B, training: TrainingClient, total: int | None) -> None:
        self.index = index
        """The position of the batch, from 0."""
        self.batch = batch
        self.training = training
        """The run as it is; another one after a restart, so take it from here in every step."""
        self.total = total
        """How many batches there are, where that is known."""
        self.metrics: dict[str, float] = {}
        """What was reported; the next checkpoint carries it in its ``user_metadata``."""
        self.entered = False
        self.trouble: Exception | None = None
        self.asked_to_stop = False
        self.is_last = False
        self._handler: Any = None

    def report(self, **numbers: float) -> None:
        """Notes numbers of this step, such as ``loss=1.5``: for the progress line and the next checkpoint."""
        for name, number in numbers.items():
            if not math.isfinite(number):
                raise ValueError(f"{name} of step {self.index} is {number}; report finite numbers")
        self.metrics.update(numbers)

    @property
    def wants_checkpoint(self) -> bool:
        """Whether a checkpoint follows this step in any case."""
        return self.asked_to_stop or self.is_last

    def stop(self) -> None:
        """Makes this step the last one, with a checkpoint after it: for a training that is good enough.

        Leaving the loop with ``break`` saves nothing.
        """
        self.is_last = True

    def __enter__(self) -> Self:
        self.entered = True
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if handler is signal.default_int_handler:  # a program's own handler is its own business
                self._handler = handler
                signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._handler = None
        return self._takes(error)

    async def __aenter__(self) -> Self:
        self.entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._takes(error)

    def _takes(self, error: BaseException | None) -> bool:
        if isinstance(error, Exception) and (is_interruption(error) or says_run_is_gone(error)):
            self.trouble = error
            return True
        return False

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.asked_to_stop:
            signal.default_int_handler(number, frame)
        self.asked_to_stop = True
        sys.stderr.write(
            "\nfinishing this step and saving a checkpoint; press Ctrl-C again to stop at once\n"
        )

    def __repr__(self) -> str:
        return f"Step({self.index}{'' if self.total is None else f' of {self.total}'})"
