"""Reading an uploaded graph: every node is checked against the allow-list, and refused by name.

Nothing is computed here. What passes is a list of steps that the interpreter can run in order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tinkex.engine.trainer.loss_arguments import ArgumentReader, Ref, references
from tinkex.engine.trainer.loss_operations import (
    ATTRIBUTES,
    METHODS,
    REFUSED_KEYWORDS,
    Operation,
    find_function,
)
from tinkex.errors import InvalidInput
from tinkex.types.custom_losses import CustomLossInput

__all__ = ["ParsedGraph", "Step", "read_graph", "refused"]

LOGPROBS = "logprobs"
MOST_INPUTS = 16
MOST_NODES = 2000
MOST_ARGUMENTS = 20_000
MOST_METRICS = 64

_ALLOWED = (
    "allowed is what computes new tensors of a known size from others: pointwise and shaping operations, reductions, "
    "indexing, products, and the losses and activations of torch.nn.functional; nothing random, in place or outside torch"
)
_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_NODE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")


@dataclass(frozen=True)
class Step:
    """One node to compute: an allowed operation, or the reading of an attribute."""

    name: str
    target: str
    operation: Operation | None  # None reads the attribute that the second argument names
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __str__(self) -> str:
        return f"node {self.name!r} ({self.target})"


@dataclass(frozen=True)
class ParsedGraph:
    """A graph that passed: the nodes of its inputs, the steps its results need, and which nodes those are."""

    places: tuple[str, ...]
    steps: tuple[Step, ...]
    loss: str
    metrics: Mapping[str, str]


def read_graph(graph: Mapping[str, object], inputs: Sequence[CustomLossInput]) -> ParsedGraph:
    """The steps of a graph of the wire format; an ``InvalidInput`` names the node and what of it is not allowed.

    Example:
        >>> read_graph({"format": 1, "nodes": nodes}, [CustomLossInput(name="logprobs", rank=1)]).loss
        'sum_1'
    """
    _check_inputs(inputs)
    if graph.get("format", 1) != 1:
        raise refused(f"its format is {str(graph['format'])[:40]}; this engine reads format 1")
    nodes = graph.get("nodes")
    if not isinstance(nodes, Sequence) or isinstance(nodes, str) or not nodes:
        raise refused("it has no list of nodes")
    if len(nodes) > MOST_NODES:
        raise refused(f"it has {len(nodes)} nodes; at most {MOST_NODES} are allowed")
    return _Reader(inputs).parse(nodes)


def refused(what: str) -> InvalidInput:
    """The error of a graph that cannot be run."""
    return InvalidInput(f"custom loss: {what}")


class _Reader:
    """Reads the nodes of one graph, in order."""

    def __init__(self, inputs: Sequence[CustomLossInput]) -> None:
        self._inputs = inputs
        self._known: set[str] = set()
        self._arguments = ArgumentReader(self._known, MOST_ARGUMENTS)
        self._places: list[str] = []
        self._steps: list[Step] = []

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
                raise refused(f"node {name!r} ({op} {target!r}): {error}") from error
            self._known.add(name)
        if output is None:
            raise refused("it has no output node")
        if len(self._places) != len(self._inputs):
            missing = ", ".join(one.name for one in self._inputs[len(self._places) :])
            raise refused(f"it has no placeholder for {missing}")
        loss, metrics = output
        return ParsedGraph(tuple(self._places), tuple(self._needed(loss, metrics)), loss, metrics)

    def _read(
        self, op: str, name: str, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, str]] | None:
        """Takes in one node; returns the loss and metrics if it is the output."""
        if op == "placeholder":
            self._place(name, target, args)
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

    def _place(self, name: str, target: str, args: Sequence[Any]) -> None:
        number = len(self._places)
        wanted = self._inputs[number].name if number < len(self._inputs) else None
        if self._steps or target != wanted or args:
            order = ", ".join(one.name for one in self._inputs)
            raise ValueError(
                f"the graph must begin with its inputs, in their order and without defaults: {order}"
            )
        self._places.append(name)

    def _function(self, name: str, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if target in {"getattr", "builtins.getattr"}:
            self._attribute(name, args, kwargs)
            return
        operation = (
            METHODS.get(target.removeprefix("torch.Tensor.")) if target.startswith("torch.Tensor.") else None
        )
        operation = operation or find_function(target)
        if operation is None:
            raise ValueError(f"this function is not allowed in a custom loss; {_ALLOWED}")
        equation = target.endswith(".einsum")
        self._steps.append(
            Step(
                name,
                target,
                operation,
                tuple(self._arguments.read(arg, texts=equation and n == 0) for n, arg in enumerate(args)),
                self._keywords(operation, kwargs),
            )
        )
        _check_positional(operation, args)

    def _method(self, name: str, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        operation = METHODS.get(target)
        if operation is None and target.endswith("_") and target.rstrip("_") in METHODS:
            raise ValueError(f"methods that work in place are not allowed; use {target.rstrip('_')!r}")
        if operation is None:
            raise ValueError(f"this method is not allowed in a custom loss; {_ALLOWED}")
        read = tuple(self._arguments.read(arg) for arg in args)
        if not read or not isinstance(read[0], Ref):
            raise ValueError("its first argument must be a node")
        _check_positional(operation, args)
        self._steps.append(Step(name, f"Tensor.{target}", operation, read, self._keywords(operation, kwargs)))

    def _attribute(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if kwargs or len(args) != 2:
            raise ValueError("it takes a node and the name of an attribute")
        source, attribute = self._arguments.read(args[0]), args[1]
        if not isinstance(source, Ref) or not isinstance(attribute, str) or attribute not in ATTRIBUTES:
            shown = repr(attribute)[:80]
            raise ValueError(
                f"the attribute {shown} cannot be read; those that can: {', '.join(sorted(ATTRIBUTES))}"
            )
        self._steps.append(Step(name, f"attribute {attribute}", None, (source, attribute), {}))

    def _keywords(self, operation: Operation, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        read = {name: self._arguments.read(value) for name, value in kwargs.items()}
        for name, value in read.items():
            if value is None or value is False:
                continue
            if name in REFUSED_KEYWORDS and value is not torch.strided:
                raise ValueError(f"its argument {name!r} is not allowed; leave it out")
            if operation.keywords is not None and name not in operation.keywords:
                raise ValueError(
                    f"its argument {name!r} is not allowed; allowed are {', '.join(sorted(operation.keywords))}"
                )
        return read

    def _output(self, args: Sequence[Any]) -> tuple[str, Mapping[str, str]]:
        returned = self._arguments.read(args[0]) if len(args) == 1 else None
        if not isinstance(returned, list | tuple) or len(returned) != 2:
            raise ValueError("a custom loss returns (loss, metrics)")
        loss, metrics = returned
        if not isinstance(loss, Ref) or not isinstance(metrics, dict):
            raise ValueError("a custom loss returns a tensor and a dict of tensors")
        if len(metrics) > MOST_METRICS:
            raise ValueError(f"it returns {len(metrics)} metrics; at most {MOST_METRICS} are allowed")
        for key, node in metrics.items():
            if not _METRIC_NAME.fullmatch(key):
                raise ValueError(
                    f"the metric {key[:80]!r} must be named custom/<name>:sum or custom/<name>:mean in lowercase"
                )
            if not isinstance(node, Ref):
                raise ValueError(f"the metric {key!r} must be a tensor")
        return loss.name, {key: node.name for key, node in metrics.items()}

    def _needed(self, loss: str, metrics: Mapping[str, str]) -> list[Step]:
        """The steps that the loss or a metric depends on."""
        if self._places[0] not in self._ancestors({loss}):
            raise refused(f"its loss, node {loss!r}, does not depend on the logprobs, so it has no gradient")
        wanted = self._ancestors({loss, *metrics.values()})
        return [step for step in self._steps if step.name in wanted]

    def _ancestors(self, names: set[str]) -> set[str]:
        for step in reversed(self._steps):
            if step.name in names:
                names |= references([*step.args, dict(step.kwargs)])
        return names


def _check_inputs(inputs: Sequence[CustomLossInput]) -> None:
    names = [one.name for one in inputs]
    if not names or names[0] != LOGPROBS or inputs[0].rank == 0:
        raise refused(f"its first input must be {LOGPROBS!r}, with rank 1 or 2")
    if len(names) > MOST_INPUTS:
        raise refused(f"it has {len(names)} inputs; at most {MOST_INPUTS} are allowed, {LOGPROBS} included")
    for number, one in enumerate(inputs):
        if not _INPUT_NAME.fullmatch(one.name):
            raise refused(
                f"its input {one.name[:80]!r} must be a lowercase name of letters, digits and underscores"
            )
        if one.name in names[:number]:
            raise refused(f"it has two inputs named {one.name!r}")
        if one.rank not in {0, 1, 2}:
            raise refused(f"its input {one.name!r} has rank {one.rank}; ranks are 0, 1 and 2")


def _fields(number: int, node: object) -> tuple[str, str, str, Sequence[Any], Mapping[str, Any]]:
    if not isinstance(node, Mapping):
        raise refused(f"node number {number} is not an object")
    op, name, target = node.get("op"), node.get("name"), node.get("target")
    args, kwargs = node.get("args", []), node.get("kwargs", {})
    if not isinstance(name, str) or not _NODE_NAME.fullmatch(name):
        raise refused(f"node number {number} has no name of letters, digits and underscores")
    if not isinstance(op, str) or not isinstance(target, str) or len(op) > 40 or len(target) > 200:
        raise refused(f"node {name!r} must have an op and a target, both short texts")
    if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
        raise refused(f"node {name!r} must have a list of args and an object of kwargs")
    if not all(isinstance(key, str) and _NODE_NAME.fullmatch(key) for key in kwargs):
        raise refused(f"node {name!r} has a keyword that is no name")
    return op, name, target, args, kwargs


def _check_positional(operation: Operation, args: Sequence[Any]) -> None:
    if operation.most_positional is not None and len(args) > operation.most_positional:
        raise ValueError(f"it takes at most {operation.most_positional} positional arguments here")
