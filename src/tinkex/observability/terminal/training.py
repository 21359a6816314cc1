"""Progress lines for long tasks: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from tinkex.observability.terminal.live import CLEAR, fitted, is_live

_PLAIN_LINE_EVERY_S = 5.0


def duration(seconds: float) -> str:
    """Formats a time for people.

    >>> duration(42.3), duration(600), duration(8000)
    ('42 s', '10 min', '2.2 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class TrainingLine:
    """Shows step, loss, tokens per second and time left, on one line that updates in place."""

    def __init__(
        self,
        total_steps: int,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        *,
        first_step: int = 0,
        label: str = "loss",
    ) -> None:
        self._total = total_steps
        self._first = first_step
        self._label = label
        self._stream = stream
        self._clock = clock
        self._start = clock()
        self._last_shown = float("-inf")
        self._tokens = 0
        self._done = first_step
        self._live = is_live(stream)

    def update(self, *, loss: float, num_tokens: int) -> None:
        """Reports one finished step."""
        self._done += 1
        self._tokens += num_tokens
        now = self._clock()
        if self._live:
            text = self.text(loss, now)
            if fitted(text, self._stream) != text:
                _, _, text = text.partition(" ")  # without the bar
            self._stream.write(CLEAR + fitted(text, self._stream))
        elif self._done == self._total or now - self._last_shown >= _PLAIN_LINE_EVERY_S:
            self._last_shown = now
            self._stream.write(self.text(loss, now) + "\n")
        self._stream.flush()

    def text(self, loss: float, now: float) -> str:
        """Returns the current line."""
        elapsed = max(now - self._start, 1e-9)
        left = elapsed / max(self._done - self._first, 1) * (self._total - self._done)
        filled = round(20 * self._done / self._total)
        bar = "━" * filled + "╌" * (20 - filled)
        return (
            f"{bar} step {self._done}/{self._total}  {self._label} {loss:.3f}  "
            f"{self._tokens / elapsed:.0f} tokens/s  {duration(left)} left"
        )

    def interrupt(self) -> None:
        """Clears the line so that something else can be written; the next update restores it."""
        if self._live:
            self._stream.write(CLEAR)
            self._stream.flush()

    def close(self) -> None:
        """Ends the line."""
        if self._live:
            self._stream.write("\n")
            self._stream.flush()


@contextmanager
def training_line(total_steps: int, stream: TextIO | None = None) -> Iterator[TrainingLine]:
    """Shows a progress line for a training loop.

    >>> import io
    >>> out = io.StringIO()
    >>> with training_line(1, out) as line:
    ...     line.update(loss=0.5, num_tokens=10)
    >>> "step 1/1  loss 0.500" in out.getvalue()
    True
    """
    line = TrainingLine(total_steps, stream or sys.stderr)
    try:
        yield line
    finally:
        line.close()
