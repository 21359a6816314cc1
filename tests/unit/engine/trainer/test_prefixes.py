"""Sequences in the order of their common prefixes."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.trainer.prefixes import count_distinct, order_by_prefix


def common_length(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)


def arrays(sequences: list[list[int]]) -> list[np.ndarray]:
    return [np.array(sequence, dtype=np.int64) for sequence in sequences]


@given(SEQUENCES)
def test_each_shares_with_its_neighbour_as_much_as_with_any_earlier_one(sequences: list[list[int]]) -> None:
    order = order_by_prefix(arrays(sequences), min_saved=1)
    assert sorted(order.numbers) == list(range(len(sequences)))
    walked = [sequences[number] for number in order.numbers]
    for place, shared in enumerate(order.shared):
        common = [common_length(earlier, walked[place]) for earlier in walked[:place]]
        assert shared == max(common, default=0)


@given(SEQUENCES)
def test_every_distinct_prefix_is_counted_once(sequences: list[list[int]]) -> None:
    prefixes = {tuple(sequence[: n + 1]) for sequence in sequences for n in range(len(sequence))}
    assert count_distinct(arrays(sequences), min_saved=1) == len(prefixes)


@given(SEQUENCES, st.integers(1, 20))
def test_prefixes_that_save_too_little_are_computed_again(sequences: list[list[int]], min_saved: int) -> None:
    distinct, total = count_distinct(arrays(sequences), min_saved=1), sum(map(len, sequences))
    counted = count_distinct(arrays(sequences), min_saved)
    assert distinct <= counted <= total
    assert counted in {distinct, total} or total - counted >= min_saved


def test_without_sharing_the_order_is_that_of_the_lengths() -> None:
    sequences = arrays([[1, 2, 3], [1], [1, 2], [4]])
    assert order_by_prefix(sequences, None).numbers == [1, 3, 2, 0]
    assert order_by_prefix(sequences, 100).numbers == [1, 3, 2, 0]
    assert not any(order_by_prefix(sequences, 100).shared)


def test_answers_of_one_length_are_neighbours_below_their_prompt() -> None:
    prompt = list(range(10))
    sequences = arrays([[*prompt, 50, 51], [7] * 3, [*prompt, 60], [*prompt, 70, 71], [*prompt, 80]])
    order = order_by_prefix(sequences)
    assert order.numbers == [1, 2, 4, 0, 3]
    assert order.shared == [0, 0, 10, 10, 10]


def test_a_common_first_token_does_not_join_sequences() -> None:
    sequences = arrays([[1, *range(10 * n, 10 * n + 9)] for n in range(1, 5)])
    assert not any(order_by_prefix(sequences).shared)


@pytest.mark.parametrize("copies", [2, 500])
def test_copies_of_a_sequence_are_counted_once(copies: int) -> None:
    assert count_distinct(arrays([[*range(20)]] * copies)) == 20


def test_a_long_chain_of_prefixes_is_ordered_from_the_shortest_to_the_longest() -> None:
    chain = arrays([[*range(10 * n)] for n in range(200, 0, -1)])
    order = order_by_prefix(chain)
    assert order.numbers == list(range(199, -1, -1))
    assert count_distinct(chain) == 2000
