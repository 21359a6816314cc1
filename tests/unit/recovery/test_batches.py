"""Batches by position, whatever the data is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tinkex.recovery.batches import END_OF_DATA, Batches


def read(batches: Batches[Any], *positions: int) -> list[Any]:
    return [batches.at(position) for position in positions]


@pytest.mark.parametrize(
    ("data", "steps", "total"),
    [
        (["a", "b", "c"], None, 3),
        (("a", "b", "c"), 3, 3),
        (lambda n: "abc"[n], 3, 3),
        (iter("abc"), None, None),
        ({"a": 1, "b": 2, "c": 3}, None, None),
        (iter("abcdef"), 3, 3),
    ],
    ids=["list", "tuple", "function", "iterator", "iterable", "bounded"],
)
def test_every_kind_of_data_can_be_read_by_position_and_again(data: Any, steps: Any, total: Any) -> None:
    batches = Batches(data, steps)
    assert batches.total == total
    assert read(batches, 0, 1, 2, 1, 0, 2) == list("abcbac")
    assert batches.at(3) is END_OF_DATA
    assert batches.at(0) == "a"


def test_what_can_be_read_once_is_read_as_late_as_possible_and_kept_no_longer_than_needed() -> None:
    drawn = []

    def stream() -> Iterator[int]:
        for n in range(10):
            drawn.append(n)
            yield n

    batches = Batches(stream(), None)
    assert read(batches, 0, 1, 2) == [0, 1, 2]
    assert drawn == [0, 1, 2]
    batches.forget_before(2)
    assert read(batches, 2, 3) == [2, 3]
    with pytest.raises(LookupError, match="read only once"):
        batches.at(1)


def test_a_training_that_is_taken_up_skips_what_it_has_seen() -> None:
    batches = Batches(iter("abcdef"), None)
    assert batches.at(4) == "e"


@pytest.mark.parametrize(
    ("data", "steps", "message"),
    [
        ([1, 2], 3, "there are 2 batches"),
        (lambda n: n, None, "set steps="),
        ([1], 0, "steps"),
        ([1], True, "steps"),
        (7, None, "got int"),
        ("train.jsonl", None, "name of a file"),
    ],
)
def test_data_that_cannot_be_used_is_rejected(data: Any, steps: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Batches(data, steps)
