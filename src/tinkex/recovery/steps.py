"""One step of a resilient training: the batch, the run to train, and a context manager for the step."""

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

__all__ = ["TrainingStep"]

B = TypeVar("B")


class TrainingStep(Generic[B]):
    """A batch and the run to apply it to; run the whole step inside its ``with`` block.

    A failure of the server or the connection ends the block, and the loop restarts from the last checkpoint. Every
    other exception propagates. On the first Ctrl-C the block completes and a checkpoint is saved; a second one stops
    immediately.
    """

    def __init__(self, index: int, batch: B, training: TrainingClient, total: int | None) -> None:
        self.index = index
        """The position of the batch, from 0."""
        self.batch = batch
        self.training = training
        """The current run; a restart replaces it, so read it in every step."""
        self.total = total
        """The number of batches, if known."""
        self.metrics: dict[str, float] = {}
        """The reported metrics; the next checkpoint has them in its ``user_metadata``."""
        self.entered = False
        self.failure: Exception | None = None
        self.stop_requested = False
        self.is_last = False
        self._handler: Any = None

    def report(self, **numbers: float) -> None:
        """Reports metrics of this step, such as ``loss=1.5``, for the progress line and the next checkpoint."""
        for name, number in numbers.items():
            if not math.isfinite(number):
                raise ValueError(f"{name} of step {self.index} is {number}; report finite numbers")
        self.metrics.update(numbers)

    @property
    def wants_checkpoint(self) -> bool:
        """Whether a checkpoint must follow this step."""
        return self.stop_requested or self.is_last

    def stop(self) -> None:
        """Makes this step the last one, with a checkpoint after it, for early stopping.

        Leaving the loop with ``break`` saves no checkpoint.
        """
        self.is_last = True

    def __enter__(self) -> Self:
        self.entered = True
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if handler is signal.default_int_handler:  # a program's own handler stays in place
                self._handler = handler
                signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._handler = None
        return self._suppresses(error)

    async def __aenter__(self) -> Self:
        self.entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._suppresses(error)

    def _suppresses(self, error: BaseException | None) -> bool:
        if isinstance(error, Exception) and (is_interruption(error) or says_run_is_gone(error)):
            self.failure = error
            return True
        return False

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.stop_requested:
            signal.default_int_handler(number, frame)
        self.stop_requested = True
        sys.stderr.write(
            "\nfinishing this step and saving a checkpoint; press Ctrl-C again to stop immediately\n"
        )

    def __repr__(self) -> str:
        return f"TrainingStep({self.index}{'' if self.total is None else f' of {self.total}'})"


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Loads a name of 0.1, with a ``DeprecationWarning``."""
        if name.startswith("__"):  # the import system looks up __path__
            raise AttributeError(name)
        from tinkex._moved import load_renamed

        return load_renamed(__name__, name)
