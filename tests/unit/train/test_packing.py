"""The packing of passes, counted by the client, is what the engine does."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.trainer import prefixes
from tinkex.train.packing import MIN_SAVED, computed_tokens, describe, from_metrics, pack, placeholders

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=12)


@given(SEQUENCES, st.integers(1, 12))
def test_the_tokens_that_are_computed_are_those_of_the_engine(
    sequences: list[list[int]], min_saved: int
) -> None:
    engine = prefixes.count_distinct([np.array(one) for one in sequences], min_saved)
    assert computed_tokens(sorted(sequences), min_saved) == engine


@given(SEQUENCES)
def test_tokens_are_different_by_all_that_precedes_them(sequences: list[list[int]]) -> None:
    beginnings = {tuple(one[:length]) for one in sequences for length in range(1, len(one) + 1)}
    assert pack(sequences).different_tokens == len(beginnings)


def test_prefixes_are_shared_from_the_same_length_on_as_in_the_engine() -> None:
    assert prefixes.MIN_SAVED == MIN_SAVED


def test_a_chain_of_many_prefixes_is_counted() -> None:
    assert pack([list(range(length)) for length in range(1, 1500)]).different_tokens == 1499


def test_a_group_of_unknown_answers_shares_only_its_prompt() -> None:
    prompt = list(range(20))
    packing = pack([[*prompt, *placeholders(6 * number, 6)] for number in range(4)])
    assert (packing.num_tokens, packing.computed_tokens) == (4 * 26, 20 + 4 * 6)


def test_the_packing_of_a_run_is_read_from_its_metrics_and_described() -> None:
    first, second = pack([[1, 2], [3]]), pack([[1]])
    metrics = [{"step": 1, "packing": [first.as_json(), second.as_json()]}, {"step": 1, "eval_loss": 1.0}]
    assert from_metrics(metrics) == [first, second]
    assert (
        describe([second])
        == "1 pass of 1 sequence, 1 token; of 1 tokens 1 are different, 0 shared; 1 computed"
    )
    assert describe([]) == "no passes: nothing was trained on"
