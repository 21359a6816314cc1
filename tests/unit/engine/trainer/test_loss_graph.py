"""Uploaded losses: what is rejected, what a graph may cost, and what a trainer makes of them."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.unit.engine.trainer.graphs import inputs_of, node, ref, traced, using, written
from tests.unit.engine.trainer.harness import (
    random_datum,
    run_one,
    sequence,
    sft_datum,
    small_transformer,
    trained_state,
)
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.trainer import loss_ops
from tinkex.engine.trainer.loss_graph import LossGraph
from tinkex.engine.trainer.loss_ops import ATTRIBUTES, METHODS, find_function
from tinkex.engine.trainer.loss_parsing import MAX_METRICS, MAX_NODES
from tinkex.engine.trainer.trainer import Trainer, TrainJob
from tinkex.errors import InvalidInput, NumericalError
from tinkex.types.inputs import Datum, ModelInput

ONE = inputs_of(logprobs=1)


def parse(graph: dict[str, Any]) -> LossGraph:
    return LossGraph.parse(graph, ONE)


def call(target: str, *args: Any, name: str = "bad", **kwargs: Any) -> dict[str, Any]:
    return node("call_function", name, target, *args, **kwargs)


def method(target: str, *args: Any, name: str = "bad", **kwargs: Any) -> dict[str, Any]:
    return node("call_method", name, target, ref("logprobs"), *args, **kwargs)


def run(graph: dict[str, Any], size: int = 5) -> None:
    parse(graph).evaluate(torch.zeros(size), [], backward=True)


FORBIDDEN_STEPS = [
    (call("torch.load", "file"), "function is not allowed"),
    (call("torch.save", ref("logprobs"), "file"), "function is not allowed"),
    (call("torch.hub.load", "a", "b"), "function is not allowed"),
    (call("torch.ops.load_library", "a"), "function is not allowed"),
    (call("torch.compile", ref("logprobs")), "function is not allowed"),
    (call("torch.rand_like", ref("logprobs")), "nothing random"),
    (call("torch.nn.functional.dropout", ref("logprobs")), "nothing random"),
    (call("torch.bernoulli", ref("logprobs")), "nothing random"),
    (call("torch.empty_like", ref("logprobs")), "function is not allowed"),
    (call("torch.linalg.svd", ref("logprobs")), "function is not allowed"),
    (call("torch.set_num_threads", 64), "function is not allowed"),
    (call("torch.manual_seed", 0), "function is not allowed"),
    (call("torch.from_file", "name"), "function is not allowed"),
    (call("builtins.eval", "1"), "function is not allowed"),
    (call("eval", "1"), "function is not allowed"),
    (call("open", "file"), "function is not allowed"),
    (call("os.system", "true"), "function is not allowed"),
    (call("operator.attrgetter", "__class__"), "function is not allowed"),
    (call("operator.methodcaller", "backward"), "function is not allowed"),
    (call("operator.setitem", ref("logprobs"), 0, 1.0), "function is not allowed"),
    (call("operator.iadd", ref("logprobs"), 1), "function is not allowed"),
    (call("operator.concat", [1], [2]), "function is not allowed"),
    (call("math.factorial", 10**6), "function is not allowed"),
    (call("math.__loader__", 1), "function is not allowed"),
    (call("torch.Tensor.item", ref("logprobs")), "function is not allowed"),
    (method("item"), "method is not allowed"),
    (method("tolist"), "method is not allowed"),
    (method("numpy"), "method is not allowed"),
    (method("backward"), "method is not allowed"),
    (method("register_hook", ref("logprobs")), "method is not allowed"),
    (method("requires_grad_"), "method is not allowed"),
    (method("data_ptr"), "method is not allowed"),
    (method("storage"), "method is not allowed"),
    (method("__reduce__"), "method is not allowed"),
    (method("__class__"), "method is not allowed"),
    (method("cuda"), "method is not allowed"),
    (method("share_memory_"), "method is not allowed"),
    (method("exp_"), "work in place are not allowed; use 'exp'"),
    (method("clamp_", 0, 1), "use 'clamp'"),
    (node("call_module", "bad", "0", ref("logprobs")), "modules are not allowed"),
    (node("get_attr", "bad", "_tensor_constant0"), "pass them as loss_fn_inputs"),
    (node("import", "bad", "os"), "this kind of node does not exist"),
    (call("getattr", ref("logprobs"), "__class__"), "attribute '__class__' cannot be read"),
    (call("getattr", ref("logprobs"), "grad_fn"), "attribute 'grad_fn' cannot be read"),
    (call("getattr", ref("logprobs"), "shape", 1), "a node and the name of an attribute"),
    (call("torch.exp", ref("logprobs"), out=ref("logprobs")), "'out' is not allowed"),
    (call("torch.zeros_like", ref("logprobs"), requires_grad=True), "'requires_grad' is not allowed"),
    (call("torch.nn.functional.relu", ref("logprobs"), inplace=True), "'inplace' is not allowed"),
    (call("torch.nn.functional.relu", ref("logprobs"), 1), "at most 1 positional"),
    (call("torch.norm", ref("logprobs"), 2, None, 0, ref("logprobs")), "at most 4 positional"),
    (
        call("torch.nn.functional.normalize", ref("logprobs"), 2, 0, 1e-12, ref("logprobs")),
        "at most 4 positional",
    ),
    (call("torch.diff", ref("logprobs"), 10**9), "at most 1 positional"),
    (call("torch.diff", ref("logprobs"), n=10**9), "'n' is not allowed"),
    (method("to", "cuda"), "string 'cuda' is not an argument"),
    (method("to", {"device": "cuda:0"}), "device 'cuda:0' is not allowed; allowed are cpu"),
    (method("to", {"device": "meta"}), "device 'meta' is not allowed"),
    (method("to", {"dtype": "complex64"}), "dtype 'complex64' is not allowed"),
    (method("to", {"layout": "sparse_coo"}), "layout 'sparse_coo' is not allowed"),
    (method("type", "torch.cuda.FloatTensor"), "is not an argument of an allowed operation"),
    (call("torch.add", ref("nobody"), 1), "'nobody', which is not an earlier node"),
    (call("torch.add", ref("bad"), 1), "'bad', which is not an earlier node"),
    (call("torch.add", ref("logprobs"), 2**63), "does not fit into 64 bits"),
    (call("torch.add", ref("logprobs"), {"code": "1"}), "object with the key 'code'"),
    (call("torch.add", ref("logprobs"), {"ref": "logprobs", "float": "inf"}), "not a value of a graph"),
    (call("torch.add", ref("logprobs"), {"float": "1e400"}), "float '1e400' is not allowed"),
    (call("torch.add", ref("logprobs"), "x" * 1000), "a string has 1000 characters"),
    (call("torch.stack", [ref("logprobs")] * 2000), "a list has 2000 entries"),
    (call("operator.getitem", ref("logprobs"), {"slice": [0]}), r"\[start, stop, step\]"),
    (
        call("operator.getitem", ref("logprobs"), {"slice": [0.5, None, None]}),
        "integers, nodes or null",
    ),
]


@pytest.mark.parametrize(("step", "message"), FORBIDDEN_STEPS, ids=lambda value: str(value)[:60])
def test_what_is_not_allowed_is_rejected_naming_the_node(step: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        parse(written(step))
    assert "node 'bad'" in str(caught.value)


def deeply_nested(depth: int) -> Any:
    return [deeply_nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ({"format": 2, "nodes": [{}]}, "its format is 2"),
        ({}, "no list of nodes"),
        ({"nodes": "nodes"}, "no list of nodes"),
        ({"nodes": [1]}, "node number 0 is not an object"),
        ({"nodes": [node("placeholder", "a b", "logprobs")]}, "node number 0 has no name"),
        ({"nodes": [{"op": 1, "name": "a", "target": "t"}]}, "node 'a' must have an op and a target"),
        ({"nodes": [{"op": "output", "name": "a", "target": "o", "args": 1}]}, "a list of args"),
        (
            {"nodes": [{"op": "output", "name": "a", "target": "o", "kwargs": {"a b": 1}}]},
            "keyword that is not a valid name",
        ),
        ({"nodes": [node("placeholder", "logprobs", "logprobs")]}, "no output node"),
        ({"nodes": [node("placeholder", "x", "weights")]}, "must start with its inputs"),
        ({"nodes": [node("placeholder", "logprobs", "logprobs", 1)]}, "without defaults"),
        (
            {"nodes": [node("output", "output", "output", {"tuple": [1, {"dict": {}}]})]},
            "a tensor and a dict",
        ),
        ({"nodes": [node("output", "output", "output", 1)]}, r"returns \(loss, metrics\)"),
        (written(call("torch.exp", ref("logprobs"), name="logprobs")), "another node has this name"),
        (written(call("torch.add", deeply_nested(20))), "nested more than 8 deep"),
        (
            written(*(call("torch.exp", ref("logprobs"), name=f"n{n}") for n in range(MAX_NODES))),
            "nodes; at most",
        ),
        (
            written(*(call("torch.stack", [ref("logprobs")] * 1000, name=f"n{n}") for n in range(30))),
            "the graph has too many arguments",
        ),
        (written(metrics={"loss:sum": ref("loss")}), r"'loss:sum' must be named custom/<name>:sum"),
        (written(metrics={"custom/x:max": ref("loss")}), "custom/<name>:sum or custom/<name>:mean"),
        (written(metrics={"custom/x:sum": 1.0}), "'custom/x:sum' must be a tensor"),
        (written(metrics={f"custom/{n}:sum": ref("loss") for n in range(MAX_METRICS + 1)}), "65 metrics"),
        (written(call("torch.ones", 2), loss="bad"), "'bad', does not depend on the logprobs"),
    ],
)
def test_a_graph_that_is_not_one_is_rejected(graph: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse(graph)


def test_nodes_after_the_output_are_rejected() -> None:
    graph = written()
    graph["nodes"].append(call("torch.exp", ref("logprobs")))
    with pytest.raises(InvalidInput, match=r"'bad'.*comes after the output"):
        parse(graph)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({}, "first input must be 'logprobs'"),
        ({"weights": 1}, "first input must be 'logprobs'"),
        ({"logprobs": 0}, "with rank 1 or 2"),
        ({"logprobs": 1, "Weights": 1}, "'Weights' must be a lowercase name"),
        ({"logprobs": 1, **{f"x{n}": 1 for n in range(16)}}, "17 inputs; at most 16"),
        ({"logprobs": 1, "weights": 1}, "no placeholder for weights"),
    ],
)
def test_inputs_that_cannot_be_declared_are_rejected(ranks: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        LossGraph.parse(written(), inputs_of(**ranks))


HUGE = 10**12
TOO_LARGE = [
    call("torch.zeros", HUGE),
    call("torch.zeros", {"tuple": [10**6, 10**6]}),
    call("torch.zeros", 10**6, 0, 10**6),  # a sum over its second dimension is as large as that of any other
    call("torch.ones", 10**6, 10**6),
    call("torch.full", [10**6, 10**6], 1.0),
    call("torch.arange", HUGE),
    call("torch.arange", 0, 1, 1e-12),
    call("torch.arange", 0, end=HUGE),
    call("torch.arange", end=HUGE, start=0),
    call("torch.linspace", 0, 1, HUGE),
    call("torch.eye", 10**7),
    method("new_zeros", HUGE),
    method("new_ones", {"tuple": [HUGE]}),
    method("new_full", [HUGE], 1.0),
    method("expand", HUGE, 5),
    method("repeat", HUGE),
    method("repeat", {"tuple": [10**6, 10**6]}),
    method("tile", {"tuple": [HUGE]}),
    call("torch.tile", ref("logprobs"), {"tuple": [HUGE]}),
    method("repeat_interleave", HUGE),
    method("broadcast_to", {"tuple": [HUGE, 5]}),
    call("torch.nn.functional.pad", ref("logprobs"), {"tuple": [0, HUGE]}),
    call("torch.nn.functional.one_hot", ref("logprobs"), HUGE),
    call("torch._C._nn.one_hot", ref("logprobs"), num_classes=HUGE),
]


@pytest.mark.parametrize("step", TOO_LARGE, ids=lambda step: str(step["target"]))
def test_a_result_that_would_be_too_large_is_never_made(step: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"node 'bad'.*its result can have \d+ elements"):
        run(using(step))


PAIRS = [
    call(
        "operator.getitem", ref("logprobs"), {"tuple": [{"slice": [None, None, None]}, None]}, name="column"
    ),
]


@pytest.mark.parametrize(
    "step",
    [
        call("operator.add", ref("column"), ref("logprobs")),
        call("torch.outer", ref("logprobs"), ref("logprobs")),
        call("torch.einsum", "i,j->ij", ref("logprobs"), ref("logprobs")),
        call("torch.functional.einsum", "i,j", ref("logprobs"), ref("logprobs")),
        call("torch.functional.meshgrid", ref("logprobs"), ref("logprobs")),
        call("torch.matmul", ref("column"), {"ref": "row"}),
        call("torch.mm", mat2=ref("row"), input=ref("column")),
        method("unfold", 0, 4000, 1),
    ],
    ids=lambda step: str(step["target"]),
)
def test_what_grows_with_the_square_of_a_datum_is_bounded_too(step: dict[str, Any]) -> None:
    row = method("unsqueeze", 0, name="row")
    graph = using(*PAIRS, row, step)
    with pytest.raises(InvalidInput, match=r"its result can have \d+ elements; at most"):
        run(graph, size=8192)
    if step["target"] != "unfold" and "meshgrid" not in step["target"]:
        with pytest.raises(InvalidInput, match="'custom/last:sum' is a float32 tensor"):
            run(graph, size=64)


@pytest.mark.parametrize(
    "step", [method("sum", 1), call("torch.inner", ref("empty"), ref("empty"))], ids=["sum", "inner"]
)
def test_what_is_made_of_nothing_is_bounded_too(step: dict[str, Any]) -> None:
    nothing = call("operator.getitem", ref("logprobs"), {"slice": [0, 0, None]}, name="nothing")
    empty = node("call_method", "empty", "reshape", ref("nothing"), 8192, 0, 8192)
    step = {**step, "args": [ref("empty"), *step["args"][1:]]}
    with pytest.raises(InvalidInput, match=r"its result can have \d+ elements; at most"):
        run(using(nothing, empty, step))


def test_lists_in_an_index_are_not_nested() -> None:
    wide = call("torch.ones", 1, 100, name="wide")
    for index in ([[0] * 30] * 30, {"tuple": [[[0] * 30] * 30]}, [ref("logprobs")]):
        with pytest.raises(InvalidInput, match="give several indices as a tuple"):
            run(using(wide, call("operator.getitem", ref("wide"), index)))
    with pytest.raises(InvalidInput, match=r"is a float32 tensor of shape \[3, 100\]"):
        run(using(wide, call("operator.getitem", ref("wide"), [0, 0, 0])))


@pytest.mark.slow
def test_many_large_results_are_too_many() -> None:
    steps = [call("operator.add", ref("column"), ref("logprobs"), name=f"square{n}") for n in range(20)]
    total = call("torch.stack", [ref(step["name"]) for step in steps], name="all")
    with pytest.raises(InvalidInput, match="exceeds the memory that is allowed"):
        run(using(*PAIRS, *steps, total), size=2048)


def test_a_tensor_is_not_cut_into_more_pieces_than_allowed() -> None:
    with pytest.raises(InvalidInput, match="more than 16384 results"):
        run(using(method("unbind", name="pieces"), call("operator.getitem", ref("pieces"), 0)), size=20_000)


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [method("unbind"), method("split", 1), call("torch.split", ref("logprobs"), split_size_or_sections=1)],
    ids=["unbind", "split", "torch.split"],
)
def test_pieces_cost_more_than_their_elements(step: dict[str, Any]) -> None:
    cuts = [{**step, "name": f"pieces{n}"} for n in range(40)]
    firsts = [call("operator.getitem", ref(cut["name"]), 0, name=f"first{n}") for n, cut in enumerate(cuts)]
    graph = using(*cuts, *firsts, call("torch.stack", [ref(first["name"]) for first in firsts]))
    with pytest.raises(InvalidInput, match="exceeds the memory that is allowed"):
        run(graph, size=16_000)
    with pytest.raises(InvalidInput, match="'custom/last:sum' is a float32 tensor"):
        run(graph, size=100)


def test_a_cut_costs_as_many_pieces_as_it_makes() -> None:
    thirds = method("chunk", 3, name="thirds")
    first = call("operator.getitem", ref("thirds"), 0, name="first")
    run(using(thirds, first, node("call_method", "total", "sum", ref("first"))), size=50_000)


def test_every_quantile_of_every_row_is_counted() -> None:
    steps = [
        call("torch.outer", ref("logprobs"), ref("logprobs"), name="square"),
        call("torch.quantile", ref("square"), ref("logprobs"), dim=1),
    ]
    with pytest.raises(InvalidInput, match=r"its result can have \d+ elements"):
        run(using(*steps), size=1000)


@pytest.mark.slow
def test_a_pass_of_one_token_has_a_small_budget() -> None:
    large = call("torch.ones", 2**18, name="large")
    sorts = [call("torch.msort", ref("large"), name=f"sort{n}") for n in range(40)]
    sums = [node("call_method", f"sum{n}", "sum", ref(sort["name"])) for n, sort in enumerate(sorts)]
    graph = using(large, *sorts, *sums, call("torch.stack", [ref(step["name"]) for step in sums]))
    with pytest.raises(InvalidInput, match="send fewer datums in one pass, or compute less"):
        run(graph, size=1)
    with pytest.raises(InvalidInput, match="'custom/last:sum' is a float32 tensor"):
        run(graph, size=4096)


def test_much_work_with_small_results_is_too_much() -> None:
    square = call("operator.add", ref("column"), ref("logprobs"), name="square")
    sums = [node("call_method", f"sum{n}", "sum", ref("square")) for n in range(400)]
    total = call("torch.stack", [ref(step["name"]) for step in sums], name="all")
    with pytest.raises(InvalidInput, match="exceeds the memory that is allowed"):
        run(using(*PAIRS, square, *sums, total), size=2048)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([call("operator.pow", 10, 10**9)], "is too large"),
        ([call("operator.mul", 2**62, 4)], "does not fit into 64 bits"),
        ([call("operator.mul", [0], 10**9)], "operators take tensors and numbers"),
        ([call("operator.mul", [ref("logprobs")], 10**9)], "operators take tensors and numbers"),
        ([call("operator.mod", "sum", 1)], "operators take tensors and numbers"),
        ([call("operator.pow", -1.0, 0.5)], "is a complex, which is not allowed"),
        ([call("operator.floordiv", 1, 0)], "division"),
        ([call("math.exp", 1000.0)], "math range error"),
        ([call("torch.pow", ref("logprobs"), ref("logprobs"), ref("logprobs"))], "cannot be computed"),
        ([method("reshape", 7)], "is invalid for input of size 5"),
        ([method("repeat_interleave", ref("logprobs"))], "repeat by a number"),
        ([call("torch.nn.functional.one_hot", ref("logprobs"))], "set it"),
        ([call("torch.einsum", "...i->i", ref("logprobs"))], "names every dimension by a letter"),
        (
            [call("torch.einsum", "i,i,i->", ref("logprobs"), ref("logprobs"), ref("logprobs"))],
            "for one or two tensors",
        ),
        ([call("torch.einsum", "ij->i", ref("logprobs"))], "does not name the dimensions"),
        ([call("getattr", ref("loss0"), "values")], "only results with several parts have 'values'"),
        ([call("getattr", ref("shape"), "shape")], "only tensors have 'shape'"),
        ([call("operator.getitem", ref("number"), 0)], "can be indexed"),
        ([call("torch.linalg.norm", ref("matrix"), 2)], "use torch.linalg.vector_norm"),
        ([method("view", {"dtype": "int32"})], r"convert it with to\(\)"),
        ([node("call_method", "bad", "chunk", ref("nothing"), 10**10)], "more than 16384 results"),
        ([method("view", {"tuple": [1] * 8 + [5]})], "9 dimensions; at most 8"),
        ([call("torch.arange", 0, 10**7, 0.9, dtype={"dtype": "int64"})], "its step is 0"),
        ([call("torch.floor_divide", ref("lowest"), -1)], "the smallest int64 by -1"),
        ([call("torch.floor_divide", ref("lowest"), ref("minus"))], "the smallest int64 by -1"),
        ([call("torch.remainder", ref("lowest"), ref("minus"))], "the smallest int64 by -1"),
        ([call("torch.fmod", input=ref("lowest"), other=-1)], "the smallest int64 by -1"),
        ([call("torch.div", ref("lowest"), -1, rounding_mode="trunc")], "the smallest int64 by -1"),
        ([call("operator.floordiv", ref("lowest"), ref("minus"))], "the smallest int64 by -1"),
        ([call("operator.mod", ref("lowest"), -1)], "the smallest int64 by -1"),
        ([node("call_method", "bad", "remainder", ref("lowest"), -1)], "the smallest int64 by -1"),
        ([node("call_method", "bad", "fmod", ref("lowest32"), 2**32 - 1)], "the smallest int32 by -1"),
    ],
)
def test_a_step_that_cannot_be_computed_is_named_with_its_arguments(
    steps: list[dict[str, Any]], message: str
) -> None:
    before = [
        method("sum", name="loss0"),
        call("getattr", ref("logprobs"), "shape", name="shape"),
        method("numel", name="number"),
        method("unsqueeze", 0, name="matrix"),
        call("operator.getitem", ref("logprobs"), {"slice": [None, 0, None]}, name="nothing"),
        call("torch.full", [3], -(2**63) + 1, name="low"),
        call("operator.sub", ref("low"), 1, name="lowest"),
        call("torch.full", [3], -1, name="minus"),
        call("torch.full", [3], -(2**31), dtype={"dtype": "int32"}, name="lowest32"),
    ]
    with pytest.raises(InvalidInput, match=message) as caught:
        run(using(*before, *steps))
    assert "node 'bad'" in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "described"), [("shape", "Size"), ("bad", r"a float32 tensor of shape \[5\]")]
)
def test_a_loss_that_is_not_a_scalar_is_rejected(returned: str, described: str) -> None:
    steps = [call("getattr", ref("logprobs"), "shape", name="shape"), call("torch.exp", ref("logprobs"))]
    with pytest.raises(InvalidInput, match=f"its loss, node {returned!r}, is .*{described}"):
        run(written(*steps, loss=returned))


def test_nodes_that_no_result_needs_are_not_computed() -> None:
    run(written(call("torch.zeros", HUGE)))


def test_a_function_is_known_by_any_name_torch_gives_it() -> None:
    assert find_function("torch._C._nn.softplus") is find_function("torch.nn.functional.softplus")
    assert find_function("torch._C._special.special_expit") is find_function("torch.special.expit")
    assert find_function("torch.functional.norm") is find_function("torch.norm")
    assert find_function("_operator.add") is find_function("operator.add")
    assert find_function("torchvision.ops.nms") is None


# What comes out of hostile graphs: an output or InvalidInput, and nothing else.

FUNCTIONS = [
    *(prefix + name for prefix, operations in loss_ops.NAMESPACES for name in sorted(operations)),
    *("getattr", "torch.load", "torch.rand", "math.factorial"),
]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.sampled_from([10**12, -(10**12), 2**62, 10**30]),
    st.floats(allow_nan=True),
    st.sampled_from(["sum", "ij", "cuda", "i,j->ij", "shape", "values", "__class__"]),
)
arguments = st.recursive(
    st.one_of(scalars, st.integers(0, 12).map(lambda n: ref(f"n{n}")), st.just(ref("logprobs"))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(lambda parts: {"tuple": parts}),
        st.lists(inner, min_size=3, max_size=3).map(lambda ends: {"slice": ends}),
        st.sampled_from(["dtype", "device", "float", "ellipsis", "dict", "ref"]).flatmap(
            lambda kind: inner.map(lambda content: {kind: content})
        ),
        st.sampled_from([{"ellipsis": True}, {"dtype": "float64"}, {"float": "inf"}, {"dtype": "int64"}]),
    ),
    max_leaves=4,
)
keywords = st.dictionaries(
    st.sampled_from(["dim", "keepdim", "out", "dtype", "inplace", "min", "reduction", "steps"]),
    arguments,
    max_size=2,
)


@st.composite
def hostile_graphs(draw: st.DrawFn) -> dict[str, Any]:
    steps = []
    for number in range(draw(st.integers(1, 10))):
        if draw(st.booleans()):
            op, target = "call_function", draw(st.sampled_from(FUNCTIONS))
        else:
            op, target = "call_method", draw(st.sampled_from([*sorted(METHODS), "item", "exp_"]))
        first = [draw(st.sampled_from([ref("logprobs"), ref(f"n{max(0, number - 1)}")]))]
        args = first + draw(st.lists(arguments, max_size=3))
        steps.append(node(op, f"n{number}", target, *args, **draw(keywords)))
    return using(*steps)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=400, deadline=None)
@given(hostile_graphs(), st.sampled_from([0, 1, 3, 257]))
def test_hostile_graphs_bring_a_result_or_a_rejection(graph: dict[str, Any], size: int) -> None:
    rejection = ""
    try:
        result = parse(graph).evaluate(torch.linspace(-3, 0, size), [], backward=True)
    except InvalidInput as error:
        rejection = str(error)
    else:
        assert isinstance(result.loss, float)
    assert not rejection or (rejection.startswith("custom loss: ") and len(rejection) < 1500)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        st.one_of(scalars, st.text(max_size=5)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(
                st.sampled_from(["format", "nodes", "op", "name", "target", "args", "kwargs", "ref"]),
                inner,
                max_size=5,
            ),
        ),
        max_leaves=30,
    )
)
def test_anything_else_in_place_of_a_graph_is_rejected(graph: Any) -> None:
    with pytest.raises(InvalidInput, match="custom loss: "):
        parse(graph if isinstance(graph, dict) else {"nodes": graph})


def test_every_allowed_attribute_can_be_read() -> None:
    for name in ATTRIBUTES - {"values", "indices"}:
        graph = written(
            method("unsqueeze", 0, name="matrix"), call("getattr", ref("matrix"), name), loss="loss"
        )
        parse(graph)


# Through the trainer.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return small_transformer(tmp_path_factory.mktemp("small"))


@pytest.fixture
def trainer(model: Transformer) -> Trainer:
    return Trainer(model)


def nll(logprobs: torch.Tensor, weights: torch.Tensor) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss.detach(), "custom/tokens:mean": (weights != 0).sum()}


def data_of(*lengths: int, seed: int = 0) -> list[Datum]:
    random = np.random.default_rng(seed)
    return [random_datum("cross_entropy", random, length) for length in lengths]


def test_losses_and_metrics_of_all_datums_are_reduced_by_their_names(trainer: Trainer) -> None:
    graph = traced(nll, logprobs=1, weights=1)
    data = data_of(9, 4, 13)
    job = TrainJob(trained_state(trainer), data, "custom", {"loss_id": "loss-1"}, custom_loss=graph)
    output = run_one(trainer, job)
    reference = run_one(trainer, TrainJob(trained_state(trainer), data, "cross_entropy"))
    assert output.loss_fn_output_type == "CustomLossReturn"
    assert output.metrics["loss:sum"] == pytest.approx(reference.metrics["loss:sum"], abs=1e-5)
    assert output.metrics["custom/nll:sum"] == pytest.approx(reference.metrics["loss:sum"], abs=1e-5)
    counts = [np.count_nonzero(datum.loss_fn_inputs["weights"].to_numpy()) for datum in data]
    assert output.metrics["custom/tokens:mean"] == pytest.approx(np.mean(counts))
    for own, expected in zip(output.loss_fn_outputs, reference.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(own["logprobs"].to_numpy(), expected["logprobs"].to_numpy(), rtol=1e-5)


def test_a_forward_pass_with_a_custom_loss_leaves_no_gradient(trainer: Trainer) -> None:
    state = trained_state(trainer)
    graph = traced(nll, logprobs=1, weights=1)
    output = run_one(trainer, TrainJob(state, data_of(5), "custom", backward=False, custom_loss=graph))
    assert state.grad is None
    assert "custom/nll:sum" in output.metrics


def test_custom_losses_of_several_tenants_share_a_pass(trainer: Trainer) -> None:
    graphs = [
        traced(nll, logprobs=1, weights=1),
        traced(lambda logprobs: (logprobs.square().mean(), {}), logprobs=1),
    ]
    jobs = [
        TrainJob(trained_state(trainer, seed=n), data_of(6, 9, seed=n), "custom", custom_loss=graph)
        for n, graph in enumerate(graphs)
    ]
    jobs.append(TrainJob(trained_state(trainer, seed=2), data_of(7, seed=2), "cross_entropy"))
    trainer.run(jobs)
    for job in jobs:
        together, job.state.grad = job.state.grad, None
        run_one(trainer, job)
        assert together is not None
        assert job.state.grad is not None
        assert float((together - job.state.grad).norm()) <= 1e-5 * float(together.norm())


def test_custom_without_a_graph_and_a_graph_without_custom_are_rejected(trainer: Trainer) -> None:
    state, graph = trained_state(trainer), traced(nll, logprobs=1, weights=1)
    with pytest.raises(InvalidInput, match="set its id in loss_fn_config"):
        trainer.check(TrainJob(state, data_of(3), "custom", {"loss_id": "loss-1"}))
    with pytest.raises(InvalidInput, match="'cross_entropy' takes no custom loss"):
        trainer.check(TrainJob(state, data_of(3), "cross_entropy", custom_loss=graph))
    with pytest.raises(InvalidInput, match="'beta', which custom does not read; its settings: loss_id"):
        trainer.check(TrainJob(state, data_of(3), "custom", {"beta": 1.0}, custom_loss=graph))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"target_tokens": [1, 2]},
            r"data\[1\].loss_fn_inputs lacks 'weights', which this custom loss needs",
        ),
        ({"weights": [1.0, 2.0]}, r"data\[1\].loss_fn_inputs lacks 'target_tokens'"),
        (
            {"target_tokens": [1, 2], "weights": np.ones((2, 1), dtype=np.float32)},
            r"\['weights'\] has shape \(2, 1\), and this custom loss declares 'weights' with rank 1",
        ),
        (
            {"target_tokens": np.ones((2, 3), dtype=np.int64), "weights": [1.0, 2.0]},
            r"\['target_tokens'\] has shape \(2, 3\), and this custom loss declares 'logprobs' with rank 1",
        ),
    ],
)
def test_inputs_that_do_not_fit_the_declaration_are_named_before_anything_runs(
    trainer: Trainer, inputs: dict[str, Any], message: str
) -> None:
    wrong = Datum(model_input=ModelInput.from_ints([3, 4]), loss_fn_inputs=inputs)
    graph = traced(nll, logprobs=1, weights=1)
    job = TrainJob(trained_state(trainer), [*data_of(3), wrong], "custom", custom_loss=graph)
    with pytest.raises(InvalidInput, match=message):
        trainer.check(job)


def test_inputs_the_loss_does_not_name_are_left_alone(trainer: Trainer) -> None:
    graph = traced(lambda logprobs: (logprobs.sum(), {}), logprobs=1)
    trainer.check(TrainJob(trained_state(trainer), data_of(3), "custom", custom_loss=graph))


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda logprobs: ((logprobs * 0).log().sum(), {}), NumericalError, r"the loss of data\[0\] is -inf"),
        (
            lambda logprobs: ((logprobs * 0).sqrt().sum(), {}),
            NumericalError,
            r"gradient of data\[0\] is not finite",
        ),
        (
            lambda logprobs: (logprobs.view(2, -1).sum(), {}),
            InvalidInput,
            r"data\[0\]: custom loss: node 'view'",
        ),
    ],
)
def test_a_custom_loss_that_fails_leaves_the_state_and_the_others_alone(
    trainer: Trainer, loss: Any, error: type[Exception], message: str
) -> None:
    state, other = trained_state(trainer), trained_state(trainer, seed=1)
    random = np.random.default_rng(0)
    bad = TrainJob(state, [sft_datum(sequence(random, 5))], "custom", custom_loss=traced(loss, logprobs=1))
    good = TrainJob(other, data_of(4), "cross_entropy")
    before = state.adapter.params.clone()
    failed, output = trainer.run([bad, good])
    assert isinstance(failed, error)
    with pytest.raises(error, match=message):
        raise failed
    assert state.grad is None
    assert torch.equal(state.adapter.params, before)
    assert not isinstance(output, Exception)
    assert other.grad is not None


def deep(num_nodes: int) -> LossGraph:
    """A loss of many small steps."""
    steps = [call("torch.neg", ref(f"n{n - 1}" if n else "logprobs"), name=f"n{n}") for n in range(num_nodes)]
    return parse(written(*steps, node("call_method", "total", "sum", ref(f"n{num_nodes - 1}")), loss="total"))


def test_what_a_pass_has_used_counts_its_nodes_and_elements(trainer: Trainer) -> None:
    used = []
    for graph, lengths in ((deep(10), (5,)), (deep(10), (5, 5)), (deep(100), (5,)), (deep(10), (60,))):
        job = TrainJob(trained_state(trainer), data_of(*lengths), "custom", custom_loss=graph)
        run_one(trainer, job)
        used.append(job.effort.spent)
    once, twice, deeper, longer = used
    assert twice == 2 * once
    assert deeper > 5 * once
    assert longer > once


def test_slow_functions_cost_more_than_fast_ones(trainer: Trainer) -> None:
    used = []
    for target in ("torch.neg", "torch.special.i0e"):
        graph = parse(
            written(
                call(target, ref("logprobs"), name="n"), node("call_method", "t", "sum", ref("n")), loss="t"
            )
        )
        job = TrainJob(trained_state(trainer), data_of(50), "custom", custom_loss=graph)
        run_one(trainer, job)
        used.append(job.effort.spent)
    assert used[1] > used[0]


@pytest.mark.slow
def test_all_datums_of_a_pass_share_one_budget(trainer: Trainer) -> None:
    state = trained_state(trainer)
    job = TrainJob(state, data_of(*[1] * 100), "custom", custom_loss=deep(1000))
    (failed,) = trainer.run([job])
    assert isinstance(failed, InvalidInput)
    assert "the losses of this pass exceed the time that is allowed for its tokens" in str(failed)
    assert 0 < job.effort.num_datums < 100, "those it was computed for"
    assert state.grad is None
    fewer = TrainJob(state, data_of(*[1] * 4), "custom", custom_loss=deep(1000))
    run_one(trainer, fewer)
    assert 0 < fewer.effort.num_tokens <= job.effort.num_tokens


@pytest.mark.parametrize(
    ("target", "expected"),
    [("torch.floor_divide", 7), ("torch.remainder", 0), ("torch.fmod", 0), ("operator.floordiv", 7)],
)
def test_other_integers_are_divided_as_ever(target: str, expected: int) -> None:
    number = call("torch.full", {"tuple": []}, -7, name="number")
    graph = using(number, call(target, ref("number"), -1, name="quotient"))
    result = parse(graph).evaluate(torch.zeros(3), [], backward=True)
    assert result.metrics == {"custom/last:sum": expected}


def test_the_smallest_integer_divided_as_a_float_is_no_error() -> None:
    smallest = [
        call("torch.full", {"tuple": []}, -(2**63) + 1, name="low"),
        call("operator.sub", ref("low"), 1, name="lowest"),
    ]
    graph = using(*smallest, call("torch.div", ref("lowest"), -1, name="quotient"))
    assert parse(graph).evaluate(torch.zeros(3), [], backward=True).metrics == {"custom/last:sum": 2.0**63}


@pytest.mark.slow
def test_no_operation_ends_the_process_on_extreme_integers() -> None:
    command = [sys.executable, "-m", "tests.unit.engine.trainer.extreme_integers"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, (
        f"{done.returncode} during {done.stdout.splitlines()[-1]}: {done.stderr[-500:]}"
    )
    assert done.stdout.endswith("done\n")


def test_a_metric_that_is_not_a_number_is_reported_as_it_is(trainer: Trainer) -> None:
    graph = traced(lambda logprobs: (logprobs.sum(), {"custom/empty:mean": logprobs[:0].mean()}), logprobs=1)
    output = run_one(trainer, TrainJob(trained_state(trainer), data_of(3), "custom", custom_loss=graph))
    assert math.isnan(output.metrics["custom/empty:mean"])


def test_the_sizes_a_step_is_rejected_for_leave_memory_alone() -> None:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("memory is read from /proc")
    before = int(statm.read_text().split()[1])
    for step in TOO_LARGE:
        with pytest.raises(InvalidInput):
            run(using(step))
    grown = (int(statm.read_text().split()[1]) - before) * 4096
    assert grown < 64 * 2**20
