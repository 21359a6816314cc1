"""Batches by position: any batch since the last checkpoint can be read again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Generic, TypeAlias, TypeVar

__all__ = ["END_OF_DATA", "Batches", "Data", "EndOfData"]

B = TypeVar("B")

Data: TypeAlias = "Sequence[B] | Iterable[B] | Callable[[int], B]"
"""Batches: a sequence, an iterable, or a function that returns the batch of a position."""


class EndOfData:
    """The data is exhausted."""


END_OF_DATA: Final = EndOfData()


class Batches(Generic[B]):
    """Batches by position, from 0.

    An iterator is read once: its batches are kept until a checkpoint makes them unnecessary.

    >>> batches = Batches(iter("abc"), steps=None)
    >>> batches.at(1), batches.at(0), batches.at(3) is END_OF_DATA
    ('b', 'a', True)
    """

    def __init__(self, data: Data[B], steps: int | None) -> None:
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise ValueError(f"steps must be an integer ≥ 1, got {steps!r}")
        self._steps = steps
        self._kept: dict[int, B] = {}
        self._read = 0
        self._sequence: Sequence[B] | None = None
        self._function: Callable[[int], B] | None = None
        self._iterator: Iterator[B] | None = None
        if isinstance(data, str | bytes):
            raise TypeError(
                f"data is {type(data).__name__}, not batches; if it is the name of a file, read it first"
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
                raise ValueError("a function can return any number of batches; set steps=…")
            self._function = data
        elif isinstance(data, Iterable):
            self._iterator = iter(data)
        else:
            raise TypeError(
                f"data must be a sequence of batches, an iterable, or a function of the position, "
                f"got {type(data).__name__}"
            )

    @property
    def total(self) -> int | None:
        """The number of batches; None if it is unknown."""
        return self._steps if self._sequence is None else self._steps or len(self._sequence)

    def at(self, position: int) -> B | EndOfData:
        """Returns the batch of a position, or ``END_OF_DATA``."""
        if self._steps is not None and position >= self._steps:
            return END_OF_DATA
        if self._function is not None:
            return self._function(position)
        if self._sequence is not None:
            return self._sequence[position] if position < len(self._sequence) else END_OF_DATA
        assert self._iterator is not None
        while self._read <= position:
            try:
                self._kept[self._read] = next(self._iterator)
            except StopIteration:
                return END_OF_DATA
            self._read += 1
        if position not in self._kept:
            raise LookupError(
                f"batch {position}, from before the last checkpoint, is needed again, but the data can be read only "
                "once; pass a sequence, or a function of the position"
            )
        return self._kept[position]

    def reaches(self, position: int) -> bool:
        """Returns whether there are at least ``position`` batches.

        >>> Batches([1, 2, 3], steps=None).reaches(3), Batches(iter("abc"), steps=None).reaches(4)
        (True, False)
        """
        if (
            position == 0
            or self._function is not None
            or (self._steps is not None and position >= self._steps)
        ):
            return True  # nothing to read, or the configured number
        return not isinstance(self.at(position - 1), EndOfData)

    def forget_before(self, position: int) -> None:
        """Drops batches that no restart needs."""
        for old in [one for one in self._kept if one < position]:
            del self._kept[old]
