"""Data by position: any batch since the last checkpoint can be had again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Generic, TypeAlias, TypeVar

__all__ = ["NO_MORE", "Batches", "Data", "NoMore"]

B = TypeVar("B")

Data: TypeAlias = "Sequence[B] | Iterable[B] | Callable[[int], B]"
"""Batches: a sequence, anything to iterate over, or a function that makes the batch of a position."""


class NoMore:
    """The data has come to its end."""


NO_MORE: Final = NoMore()


class Batches(Generic[B]):
    """Batches by position, from 0.

    What can only be read once is read once: its batches are kept until a checkpoint makes them unnecessary.

    >>> batches = Batches(iter("abc"), steps=None)
    >>> batches.at(1), batches.at(0), batches.at(3) is NO_MORE
    ('b', 'a', True)
    """

    def __init__(self, data: Data[B], steps: int | None) -> None:
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise ValueError(f"steps is a whole number from 1 up, got {steps!r}")
        self._steps = steps
        self._kept: dict[int, B] = {}
        self._read = 0
        self._sequence: Sequence[B] | None = None
        self._function: Callable[[int], B] | None = None
        self._iterator: Iterator[B] | None = None
        if isinstance(data, str | bytes):
            raise TypeError(
                f"data is {type(data).__name__}, which holds no batches; if it is the name of a file, read it first"
            )
        if isinstance(data, Sequence):
            if steps is not None and steps > len(data):
                raise ValueError(
                    f"steps={steps}, but there are {len(data)} batches; repeat them (data * epochs), or pass a "
                    "function of the position"
                )
            self._sequence = data
        elif callable(data):
            if steps is None:
                raise ValueError("a function can make batches without end; say how many with steps=…")
            self._function = data
        elif isinstance(data, Iterable):
            self._iterator = iter(data)
        else:
            raise TypeError(
                f"data is a sequence of batches, something to iterate over, or a function of the position; "
                f"got {type(data).__name__}"
            )

    @property
    def total(self) -> int | None:
        """How many there are; None where only reading them tells."""
        return self._steps if self._sequence is None else self._steps or len(self._sequence)

    def at(self, position: int) -> B | NoMore:
        """The batch of a position, or ``NO_MORE``."""
        if self._steps is not None and position >= self._steps:
            return NO_MORE
        if self._function is not None:
            return self._function(position)
        if self._sequence is not None:
            return self._sequence[position] if position < len(self._sequence) else NO_MORE
        assert self._iterator is not None
        while self._read <= position:
            try:
                self._kept[self._read] = next(self._iterator)
            except StopIteration:
                return NO_MORE
            self._read += 1
        if position not in self._kept:
            raise LookupError(
                f"batch {position} is needed again, from before the last checkpoint, and the data can be read only "
                "once; pass a sequence, or a function of the position"
            )
        return self._kept[position]

    def reaches(self, position: int) -> bool:
        """Whether there are as many batches as a training that stands at this position has seen.

        >>> Batches([1, 2, 3], steps=None).reaches(3), Batches(iter("abc"), steps=None).reaches(4)
        (True, False)
        """
        if (
            position == 0
            or self._function is not None
            or (self._steps is not None and position >= self._steps)
        ):
            return True  # nothing was read; or as many as are wanted
        return not isinstance(self.at(position - 1), NoMore)

    def forget_before(self, position: int) -> None:
        """Drops batches that no restart will ask for."""
        for old in [one for one in self._kept if one < position]:
            del self._kept[old]
