"""A function becomes a graph: what is rejected, how it is written down, and that it computes the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.rejected_losses import REJECTED
from tinkex import types
from tinkex.losses.traced import check_inputs, run_handle, trace_loss, write_graph


def datum(*tokens: int, **inputs: Any) -> types.Datum:
    return types.Datum(types.ModelInput.from_ints(list(tokens)), {"target_tokens": list(tokens), **inputs})


def test_a_graph_lists_the_steps_in_order() -> None:
    def neg_ll(logprobs: Any, weights: Any) -> Any:
        loss = -(logprobs * weights).sum(dim=-1)
        return loss, {"custom/neg_ll:sum": loss}

    graph = write_graph(trace_loss(neg_ll, {"logprobs": 1, "weights": 1}))
    assert graph.format == 1
    assert [(node.op, node.target) for node in graph.nodes] == [
        ("placeholder", "logprobs"),
        ("placeholder", "weights"),
        ("call_function", "operator.mul"),
        ("call_method", "sum"),
        ("call_function", "operator.neg"),
        ("output", "output"),
    ]
    assert graph.nodes[2].args == [{"ref": "logprobs"}, {"ref": "weights"}]
    assert graph.nodes[3].kwargs == {"dim": -1}
    assert graph.nodes[5].args == [
        {"tuple": [{"ref": "neg"}, {"dict": {"custom/neg_ll:sum": {"ref": "neg"}}}]}
    ]


def test_every_kind_of_argument_has_its_form() -> None:
    def loss(logprobs: Any) -> Any:
        part = logprobs[..., 1:None:2].clamp(min=-math.inf, max=math.nan)
        part = part.to(torch.float64, device=torch.device("cpu")).contiguous(
            memory_format=torch.preserve_format
        )
        zeros = torch.zeros((2, 3), layout=torch.strided) if False else part
        return torch.stack([zeros.sum(), part.mean()]).sum(), {}

    written = [(node.args, node.kwargs) for node in write_graph(trace_loss(loss, {"logprobs": 1})).nodes]
    text = repr(written)
    for form in (
        "{'tuple': [{'ellipsis': True}, {'slice': [1, None, 2]}]}",
        "{'float': '-inf'}",
        "{'float': 'nan'}",
        "{'dtype': 'float64'}",
        "{'device': 'cpu'}",
        "{'memory_format': 'preserve_format'}",
        "[{'ref': 'sum_1'}, {'ref': 'mean'}]",
    ):
        assert form in text, form


@pytest.mark.parametrize(("fn", "ranks", "says"), REJECTED)
def test_a_function_that_is_not_a_loss_is_rejected_with_an_error_that_names_it(
    fn: Callable[..., Any], ranks: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says) as rejected:
        trace_loss(fn, ranks)
    assert fn.__name__ in str(rejected.value)


def weighted(logprobs: Any, weights: Any, scale: Any) -> Any:
    loss = -(logprobs * weights).sum() * scale
    return loss, {"custom/nll:sum": loss, "custom/lp:mean": logprobs.mean()}


RANKS: dict[str, Any] = {"logprobs": 1, "weights": 1, "scale": 0}


def test_losses_are_summed_over_datums_and_metrics_combined_by_their_names() -> None:
    handle = trace_loss(weighted, RANKS)
    scale = types.TensorData(data=[2.0], dtype="float32", shape=[])
    data = [datum(1, 2, weights=[1.0, 1.0], scale=scale), datum(3, weights=[0.5], scale=scale)]
    logprobs = [torch.tensor([-1.0, -2.0]), torch.tensor([-4.0])]
    loss, metrics = run_handle(handle, data, logprobs)
    assert float(loss) == 10.0
    assert metrics == {"custom/nll:sum": 10.0, "custom/lp:mean": pytest.approx((-1.5 - 4.0) / 2)}


def test_data_without_an_input_or_of_another_rank_is_rejected() -> None:
    handle = trace_loss(weighted, RANKS)
    with pytest.raises(ValueError, match=r"data\[0\] has no weights"):
        check_inputs(handle, [datum(1)])
    with pytest.raises(ValueError, match=r"scale of data\[0\] has rank 1.*rank 0"):
        check_inputs(
            handle,
            [datum(1, weights=[1.0], scale=types.TensorData(data=[1.0], dtype="float32", shape=[1]))],
        )


def test_a_loss_of_many_numbers_is_rejected_when_it_runs() -> None:
    def per_token(logprobs: Any) -> Any:
        return -logprobs, {}

    with pytest.raises(ValueError, match=r"shape \(2,\).*sum or average"):
        run_handle(trace_loss(per_token, {"logprobs": 1}), [datum(1, 2)], [torch.zeros(2)])


def test_equal_losses_have_equal_keys_and_others_do_not() -> None:
    same = trace_loss(weighted, RANKS)
    assert same.key == trace_loss(weighted, RANKS).key
    assert same.key != trace_loss(weighted, {**RANKS, "scale": 1}).key
    assert same.key != trace_loss(lambda logprobs: (logprobs.sum(), {}), {"logprobs": 1}).key
