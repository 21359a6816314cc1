"""What custom losses may cost: memory per datum, and one budget of effort for all datums of a pass.

Effort is counted before an operation runs, from its arguments, so it is the same on every machine and in every replay.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinkex.engine.trainer.loss_sizes import Cost

__all__ = ["EFFORT_PER_TOKEN", "SLICE_EFFORT", "EffortSlice", "PassEffort", "SliceUsed"]

MAX_ELEMENTS = 2**24  # of one result
MAX_TOTAL_ELEMENTS = 2**26  # of all results of one datum, which the backward pass may need

EFFORT_PER_TOKEN = 2**16
"""The effort that counts as much as one token: enough for all pairs of tokens of a long datum, and more."""
BASE_EFFORT = 2**28
"""The effort that every pass may use, however few tokens it has: a fraction of a second."""
SLICE_EFFORT = 2**26
"""The effort after which a pass lets others have their turn, between two datums."""
NODE_EFFORT = 2**14
"""The effort of a node besides its elements: what one operation on a single element takes, forward and backward."""


class SliceUsed(Exception):
    """Others have their turn before the next datum."""


class PassEffort:
    """The effort budget of one pass, and how much of it its datums have used.

    Example:
        >>> effort = PassEffort(num_tokens=10)
        >>> effort.next_datum()
        >>> effort.spend(Cost(elements=100, effort=300))
        >>> effort.spent
        16684
    """

    def __init__(self, num_tokens: int = 0) -> None:
        self.spent = 0
        """The effort that was used, in elements read and written."""
        self.num_datums = 0
        """The datums that it was used for."""
        self.tokens_computed = 0
        """The tokens that the model has computed for the pass; those that an earlier job of the same pass has count there."""
        self._limit = 0
        self._elements = 0
        self.start(num_tokens)

    @property
    def num_tokens(self) -> int:
        """What was used, in tokens of equal cost."""
        return -(-self.spent // EFFORT_PER_TOKEN)

    def start(self, num_tokens: int) -> None:
        """Begin a pass over so many tokens, from the first datum on."""
        self.spent = self.num_datums = self.tokens_computed = 0
        self._limit = BASE_EFFORT + EFFORT_PER_TOKEN * num_tokens

    def next_datum(self) -> None:
        """Begin a datum: the memory of the one before it is free again."""
        self._elements = MAX_TOTAL_ELEMENTS
        self.num_datums += 1

    def spend(self, cost: Cost, slowness: int = 1) -> None:
        """Count an operation that is about to run; raises ``ValueError`` if it exceeds a limit.

        ``slowness`` is how much longer its elements take than those that are only read and written.
        """
        if cost.elements > MAX_ELEMENTS:
            raise ValueError(
                f"its result can have {cost.elements} elements; at most {MAX_ELEMENTS} are allowed"
            )
        self._elements -= max(0, cost.elements)
        if self._elements < 0:
            raise ValueError("with it, the loss of one datum exceeds the memory that is allowed")
        effort = NODE_EFFORT + slowness * max(0, cost.effort)
        if self.spent + effort > self._limit:
            raise ValueError(
                "with it, the losses of this pass exceed the time that is allowed for its tokens; send fewer datums in one "
                "pass, or compute less for each"
            )
        self.spent += effort


class EffortSlice:
    """What the jobs of one pass may use together before others have their turn.

    >>> effort = PassEffort()
    >>> part = EffortSlice([effort], size=1000)
    >>> part.check()
    >>> effort.spent = 1000
    >>> part.check()
    Traceback (most recent call last):
      ...
    tinkex.engine.trainer.loss_effort.SliceUsed
    >>> part.renew()
    >>> part.check()
    """

    def __init__(self, efforts: Sequence[PassEffort], size: int = SLICE_EFFORT) -> None:
        self._efforts = efforts
        self._size = size
        self._start = 0

    def check(self) -> None:
        """Raise :class:`SliceUsed` if it is used up."""
        if self._spent() - self._start >= self._size:
            raise SliceUsed

    def renew(self) -> None:
        """Begin the next one."""
        self._start = self._spent()

    def _spent(self) -> int:
        return sum(effort.spent for effort in self._efforts)
