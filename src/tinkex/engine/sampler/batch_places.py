"""Whose sequence gets the next place in the decode batch.

A request may have many more sequences than the batch has places, and those of one user would otherwise fill it until they end. A free
place therefore goes to the user who has the fewest, and a user who has none gets one of a few places beyond a full batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex.engine.sampler.prefill import Prefill
    from tinkex.engine.sampler.request import Continuation

__all__ = ["EXTRA_PLACES", "admits", "count_places", "next_place", "next_ready"]

EXTRA_PLACES = 8
"""Places beyond a full batch, for users who have none in it."""


def admits(num_taken: int, users: Collection[str], user: str, max_batch: int) -> bool:
    """Whether a user's request may join ``users`` whose sequences take or wait for so many places.

    >>> admits(1000, {"ada"}, "ada", max_batch=64), admits(1000, {"ada"}, "bob", max_batch=64)
    (False, True)
    """
    return num_taken < max_batch or (user not in users and len(users) <= EXTRA_PLACES)


def next_place(ready: Sequence[str], decoding: Collection[str], max_batch: int) -> int | None:
    """Returns which of the sequences that are ready gets a place, given the users of all; None if none does.

    >>> next_place(["ada", "ada", "bob"], ["ada"], max_batch=2)
    2
    >>> next_place(["ada", "bob"], ["ada", "ada"], max_batch=2), next_place(["ada"], ["ada", "ada"], max_batch=2)
    (1, None)
    """
    if not ready or len(decoding) >= max_batch + EXTRA_PLACES:
        return None
    places = Counter(decoding)
    first = min(range(len(ready)), key=lambda index: places[ready[index]])
    return first if len(decoding) < max_batch or not places[ready[first]] else None


def next_ready(
    ready: Sequence[tuple[Continuation, object]], decoding: Iterable[Continuation], max_batch: int
) -> int | None:
    """The same for continuations.

    Example:
        >>> next_ready(ready, decoding, max_batch=64)
        0
    """
    if not ready:
        return None
    return next_place(
        [each.request.job.owner for each, _ in ready],
        [each.request.job.owner for each in decoding],
        max_batch,
    )


def count_places(continuations: Iterable[Continuation], prefilling: Iterable[Prefill]) -> Counter[str]:
    """Counts the places that the sequences of each user take or will take.

    Example:
        >>> count_places(decoding, prefilling).total()
        64
    """
    places = Counter(each.request.job.owner for each in continuations)
    for prefill in prefilling:
        places[prefill.owner] += len(prefill.continuations)
    return places
