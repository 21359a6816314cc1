"""Combining the metrics and outputs of a split call."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex import types
from tinkex.clients._reduction import combine, combine_metrics


@pytest.mark.parametrize(
    ("name", "values", "datums", "expected"),
    [
        ("loss:sum", [1.0, 2.5], [1, 9], {"loss:sum": 3.5}),
        ("x:min", [3.0, -1.0], [1, 1], {"x:min": -1.0}),
        ("x:max", [3.0, -1.0], [1, 1], {"x:max": 3.0}),
        ("kl:mean", [1.0, 4.0], [2, 1], {"kl:mean": 2.0}),
        ("kl:mean", [1.0, 4.0], [0, 0], {"kl:mean": 2.5}),
        ("t:slack", [1.0, 4.0], [2, 1], {"t:slack": 2.0}),
        ("t:slack", [4.0], [2], {"t:slack": 0.0}),
        ("h:hash2", [2.0**63, 2.0**63], [1, 1], {"h:hash2": 0}),
        ("h:hash2", [3.0, 4.0], [1, 1], {"h:hash2": 7}),
        ("s:unique", [5.0, 6.0, 7.0], [1, 1, 1], {"s:unique": 5.0, "s:unique_1": 6.0, "s:unique_2": 7.0}),
        ("h:hash_unordered", [3.0, 4.0], [1, 1], {"h:hash_unordered": 7}),
        ("h:hash_unordered", [4.0, 3.0], [1, 1], {"h:hash_unordered": 7}),
        ("h:hash_unordered", [2.0**63, 2.0**63], [1, 1], {"h:hash_unordered": 0}),
        ("x:median", [1.0, 3.0], [1, 3], {"x:median": 2.5}),
        ("x:median", [1.0], [1], {"x:median": 1.0}),
        ("plain", [1.0, 4.0], [2, 1], {"plain": 2.0}),
        ("plain", [1.0], [1], {"plain": 1.0}),
        ("a:b:sum", [1.0, 2.0], [1, 1], {"a:b:sum": 3.0}),
        ("x:", [1.0, 2.0], [1, 1], {"x:": 1.5}),
    ],
)
def test_every_reduction(
    name: str, values: list[float], datums: list[int], expected: dict[str, float]
) -> None:
    assert combine_metrics([{name: value} for value in values], datums) == expected


def test_a_metric_that_a_chunk_lacks_is_reduced_over_the_others() -> None:
    chunks = [{"a:sum": 1.0, "accuracy:mean": 0.8}, {"c:max": 3.0}, {"a:sum": 2.0, "accuracy:mean": 0.6}]
    combined = combine_metrics(chunks, [2, 4, 1])
    assert combined == pytest.approx({"a:sum": 3.0, "accuracy:mean": 2.2 / 3, "c:max": 3.0})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_hash_that_is_not_a_number_stays_one(value: float) -> None:
    combined = combine_metrics([{"h:hash_unordered": value}, {"h:hash_unordered": 1.0}], [1, 1])
    assert np.isnan(combined["h:hash_unordered"])


@pytest.mark.parametrize(
    "name", ["loss:sum", "x:median", "plain", "a:b:c", "h:hash_unordered", "h:hash2", "s:unique"]
)
def test_one_chunk_keeps_every_metric_as_it_is(name: str) -> None:
    assert combine_metrics([{name: 5.0}], [3]) == {name: 5.0}


@pytest.mark.parametrize("name", ["kl:mean", "x:median", "plain"])
def test_the_mean_of_one_chunk_is_exact(name: str) -> None:
    assert combine_metrics([{name: 0.8}], [3]) == {name: 0.8}, "0.8 * 3 / 3 is another number"


@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(1, 7),
)
def test_combining_in_two_steps_equals_combining_in_one(pieces: list[tuple[float, int]], cut: int) -> None:
    names = ("x:sum", "x:mean", "x:min", "x:max")
    metrics = [dict.fromkeys(names, value) for value, _ in pieces]
    datums = [count for _, count in pieces]
    left, right = metrics[:cut], metrics[cut:]
    if not right:
        return
    halves = [combine_metrics(left, datums[:cut]), combine_metrics(right, datums[cut:])]
    at_once = combine_metrics(metrics, datums)
    in_steps = combine_metrics(halves, [sum(datums[:cut]), sum(datums[cut:])])
    assert in_steps == pytest.approx(at_once, rel=1e-9, abs=1e-6)


def test_outputs_are_joined_in_order() -> None:
    def output(*values: float) -> types.ForwardBackwardOutput:
        tensors = [{"logprobs": types.TensorData.from_numpy(np.array([v], np.float32))} for v in values]
        return types.ForwardBackwardOutput("ArrayRecord", tensors, {"loss:sum": sum(values)})

    whole = combine([output(1, 2), output(3)])
    assert [o["logprobs"].data for o in whole.loss_fn_outputs] == [[1.0], [2.0], [3.0]]
    assert whole.metrics == {"loss:sum": 6.0}
    assert whole.loss_fn_output_type == "ArrayRecord"
