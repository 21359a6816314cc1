"""Parses the graph of a custom loss: every node is checked against the allow-list; errors name the node.

Nothing is computed here. The result is a list of nodes that the interpreter runs in order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tinkex.engine.trainer.loss_arguments import ArgumentReader, Ref, references
from tinkex.engine.trainer.loss_ops import (
    ATTRIBUTES,
    METHODS,
    REJECTED_KEYWORDS,
    AllowedOp,
    find_function,
)
from tinkex.errors import InvalidInput
from tinkex.types.custom_losses import CustomLossInput

__all__ = ["GraphNode", "ParsedGraph", "graph_error", "read_graph"]

LOGPROBS = "logprobs"
MAX_INPUTS = 16
MAX_NODES = 2000
MAX_ARGUMENTS = 20_000
MAX_METRICS = 64

_ALLOWED = (
    "allowed are operations that compute new tensors of a known size: pointwise and shape operations, reductions, "
    "indexing, products, and the losses and activations of torch.nn.functional; nothing random, in place or outside torch"
)
_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_NODE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")


@dataclass(frozen=True)
class GraphNode:
    """One node to compute: an allowed operation, or an attribute access."""

    name: str
    target: str
    op: AllowedOp | None  # None reads the attribute that the second argument names
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __str__(self) -> str:
        return f"node {self.name!r} ({self.target})"


@dataclass(frozen=True)
class ParsedGraph:
    """A valid graph: its placeholders, the nodes that its results depend on, and the names of the results."""

    placeholders: tuple[str, ...]
    nodes: tuple[GraphNode, ...]
    loss: str
    metrics: Mapping[str, str]


def read_graph(graph: Mapping[str, object], inputs: Sequence[CustomLossInput]) -> ParsedGraph:
    """Parses the wire format; raises ``InvalidInput``, which names the node and what is not allowed.

    Example:
        >>> read_graph({"format": 1, "nodes": nodes}, [CustomLossInput(name="logprobs", rank=1)]).loss
        'sum_1'
    """
    _check_inputs(inputs)
    if graph.get("format", 1) != 1:
        raise graph_error(f"its format is {str(graph['format'])[:40]}; this engine reads format 1")
    nodes = graph.get("nodes")
    if not isinstance(nodes, Sequence) or isinstance(nodes, str) or not nodes:
        raise graph_error("it has no list of nodes")
    if len(nodes) > MAX_NODES:
        raise graph_error(f"it has {len(nodes)} nodes; at most {MAX_NODES} are allowed")
    return _GraphParser(inputs).parse(nodes)


def graph_error(what: str) -> InvalidInput:
    """The error for a graph that cannot run."""
    return InvalidInput(f"custom loss: {what}")


class _GraphParser:
    """Parses the nodes of one graph, in order."""

    def __init__(self, inputs: Sequence[CustomLossInput]) -> None:
        self._inputs = inputs
        self._known: set[str] = set()
        self._arguments = ArgumentReader(self._known, MAX_ARGUMENTS)
        self._placeholders: list[str] = []
        self._nodes: list[GraphNode] = []

    def parse(self, nodes: Sequence[object]) -> ParsedGraph:
        output = None
        for number, node in enumerate(nodes):
            op, name, target, args, kwargs = _fields(number, node)
            try:
                if output is not None:
                    raise ValueError("it comes after the output")
                if name in self._known:
                    raise ValueError("another node has this name")
                output = self._read(op, name, target, args, kwargs)
            except ValueError as error:
                raise graph_error(f"node {name!r} ({op} {target!r}): {error}") from error
            self._known.add(name)
        if output is None:
            raise graph_error("it has no output node")
        if len(self._placeholders) != len(self._inputs):
            missing = ", ".join(declared.name for declared in self._inputs[len(self._placeholders) :])
            raise graph_error(f"it has no placeholder for {missing}")
        loss, metrics = output
        return ParsedGraph(tuple(self._placeholders), tuple(self._required(loss, metrics)), loss, metrics)

    def _read(
        self, op: str, name: str, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, str]] | None:
        """Parses one node; returns the loss and metrics if it is the output."""
        if op == "placeholder":
            self._placeholder(name, target, args)
        elif op == "call_function":
            self._function(name, target, args, kwargs)
        elif op == "call_method":
            self._method(name, target, args, kwargs)
        elif op == "output":
            return self._output(args)
        elif op == "call_module":
            raise ValueError("modules are not allowed; use functions such as those of torch.nn.functional")
        elif op == "get_attr":
            raise ValueError("tensors from outside the function are not allowed; pass them as loss_fn_inputs")
        else:
            raise ValueError("this kind of node does not exist")
        return None

    def _placeholder(self, name: str, target: str, args: Sequence[Any]) -> None:
        number = len(self._placeholders)
        wanted = self._inputs[number].name if number < len(self._inputs) else None
        if self._nodes or target != wanted or args:
            order = ", ".join(declared.name for declared in self._inputs)
            raise ValueError(f"the graph must start with its inputs, in order and without defaults: {order}")
        self._placeholders.append(name)

    def _function(self, name: str, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if target in {"getattr", "builtins.getattr"}:
            self._attribute(name, args, kwargs)
            return
        op = METHODS.get(target.removeprefix("torch.Tensor.")) if target.startswith("torch.Tensor.") else None
        op = op or find_function(target)
        if op is None:
            raise ValueError(f"this function is not allowed in a custom loss; {_ALLOWED}")
        equation = target.endswith(".einsum")
        self._nodes.append(
            GraphNode(
                name,
                target,
                op,
                tuple(
                    self._arguments.read(arg, any_string=equation and n == 0) for n, arg in enumerate(args)
                ),
                self._keywords(op, kwargs),
            )
        )
        _check_positional(op, args)

    def _method(self, name: str, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        op = METHODS.get(target)
        if op is None and target.endswith("_") and target.rstrip("_") in METHODS:
            raise ValueError(f"methods that work in place are not allowed; use {target.rstrip('_')!r}")
        if op is None:
            raise ValueError(f"this method is not allowed in a custom loss; {_ALLOWED}")
        read = tuple(self._arguments.read(arg) for arg in args)
        if not read or not isinstance(read[0], Ref):
            raise ValueError("its first argument must be a node")
        _check_positional(op, args)
        self._nodes.append(GraphNode(name, f"Tensor.{target}", op, read, self._keywords(op, kwargs)))

    def _attribute(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if kwargs or len(args) != 2:
            raise ValueError("it takes a node and the name of an attribute")
        source, attribute = self._arguments.read(args[0]), args[1]
        if not isinstance(source, Ref) or not isinstance(attribute, str) or attribute not in ATTRIBUTES:
            shown = repr(attribute)[:80]
            raise ValueError(
                f"the attribute {shown} cannot be read; those that can: {', '.join(sorted(ATTRIBUTES))}"
            )
        self._nodes.append(GraphNode(name, f"attribute {attribute}", None, (source, attribute), {}))

    def _keywords(self, op: AllowedOp, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        read = {name: self._arguments.read(value) for name, value in kwargs.items()}
        for name, value in read.items():
            if value is None or value is False:
                continue
            if name in REJECTED_KEYWORDS and value is not torch.strided:
                raise ValueError(f"its argument {name!r} is not allowed; leave it out")
            if op.keywords is not None and name not in op.keywords:
                raise ValueError(
                    f"its argument {name!r} is not allowed; allowed are {', '.join(sorted(op.keywords))}"
                )
        return read

    def _output(self, args: Sequence[Any]) -> tuple[str, Mapping[str, str]]:
        returned = self._arguments.read(args[0]) if len(args) == 1 else None
        if not isinstance(returned, list | tuple) or len(returned) != 2:
            raise ValueError("a custom loss returns (loss, metrics)")
        loss, metrics = returned
        if not isinstance(loss, Ref) or not isinstance(metrics, dict):
            raise ValueError("a custom loss returns a tensor and a dict of tensors")
        if len(metrics) > MAX_METRICS:
            raise ValueError(f"it returns {len(metrics)} metrics; at most {MAX_METRICS} are allowed")
        for key, node in metrics.items():
            if not _METRIC_NAME.fullmatch(key):
                raise ValueError(
                    f"the metric {key[:80]!r} must be named custom/<name>:sum or custom/<name>:mean in lowercase"
                )
            if not isinstance(node, Ref):
                raise ValueError(f"the metric {key!r} must be a tensor")
        return loss.name, {key: node.name for key, node in metrics.items()}

    def _required(self, loss: str, metrics: Mapping[str, str]) -> list[GraphNode]:
        """The nodes that the loss or a metric depends on."""
        if self._placeholders[0] not in self._ancestors({loss}):
            raise graph_error(
                f"its loss, node {loss!r}, does not depend on the logprobs, so it has no gradient"
            )
        wanted = self._ancestors({loss, *metrics.values()})
        return [node for node in self._nodes if node.name in wanted]

    def _ancestors(self, names: set[str]) -> set[str]:
        for node in reversed(self._nodes):
            if node.name in names:
                names |= references([*node.args, dict(node.kwargs)])
        return names


def _check_inputs(inputs: Sequence[CustomLossInput]) -> None:
    names = [declared.name for declared in inputs]
    if not names or names[0] != LOGPROBS or inputs[0].rank == 0:
        raise graph_error(f"its first input must be {LOGPROBS!r}, with rank 1 or 2")
    if len(names) > MAX_INPUTS:
        raise graph_error(
            f"it has {len(names)} inputs; at most {MAX_INPUTS} are allowed, {LOGPROBS} included"
        )
    for number, declared in enumerate(inputs):
        if not _INPUT_NAME.fullmatch(declared.name):
            raise graph_error(
                f"its input {declared.name[:80]!r} must be a lowercase name of letters, digits and underscores"
            )
        if declared.name in names[:number]:
            raise graph_error(f"it has two inputs named {declared.name!r}")
        if declared.rank not in {0, 1, 2}:
            raise graph_error(f"its input {declared.name!r} has rank {declared.rank}; ranks are 0, 1 and 2")


def _fields(number: int, node: object) -> tuple[str, str, str, Sequence[Any], Mapping[str, Any]]:
    if not isinstance(node, Mapping):
        raise graph_error(f"node number {number} is not an object")
    op, name, target = node.get("op"), node.get("name"), node.get("target")
    args, kwargs = node.get("args", []), node.get("kwargs", {})
    if not isinstance(name, str) or not _NODE_NAME.fullmatch(name):
        raise graph_error(f"node number {number} has no name of letters, digits and underscores")
    if not isinstance(op, str) or not isinstance(target, str) or len(op) > 40 or len(target) > 200:
        raise graph_error(f"node {name!r} must have an op and a target, both short strings")
    if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
        raise graph_error(f"node {name!r} must have a list of args and an object of kwargs")
    if not all(isinstance(key, str) and _NODE_NAME.fullmatch(key) for key in kwargs):
        raise graph_error(f"node {name!r} has a keyword that is not a valid name")
    return op, name, target, args, kwargs


def _check_positional(op: AllowedOp, args: Sequence[Any]) -> None:
    if op.max_positional is not None and len(args) > op.max_positional:
        raise ValueError(f"it takes at most {op.max_positional} positional arguments here")
