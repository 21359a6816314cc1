"""Custom losses: a traced graph that is parsed as data, validated, and run by an interpreter.

No part of the graph is executed as code. Every node is an operation of the allow-list, applied to the results of earlier
nodes; a budget bounds the memory of one datum and the time of a pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.model.memory import is_out_of_memory
from tinkex.engine.trainer.loss_arguments import INTEGER_LIMIT, substitute
from tinkex.engine.trainer.loss_effort import PassEffort
from tinkex.engine.trainer.loss_parsing import GraphNode, ParsedGraph, graph_error, read_graph
from tinkex.engine.trainer.loss_sizes import tensors_in
from tinkex.types.custom_losses import CustomLossInput

__all__ = ["OP_ERRORS", "DatumLoss", "LossGraph"]

MAX_DIMENSIONS = 8
_MAX_SEQUENCE_LENGTH = 2**16  # of shapes and of several results

OP_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class DatumLoss:
    """The result of a graph for one datum: its loss, its metrics, and the derivative of the loss by each logprob."""

    loss: float
    metrics: Mapping[str, float]
    gradient: Tensor | None


class LossGraph:
    """A custom loss, ready to run on one datum at a time.

    ``input_names`` are the ``loss_fn_inputs`` it reads besides the logprobs, and ``ranks`` the rank of every input, the
    logprobs first.

    Example:
        >>> inputs = [CustomLossInput(name="logprobs", rank=1), CustomLossInput(name="weights", rank=1)]
        >>> graph = LossGraph.parse({"format": 1, "nodes": nodes}, inputs)
        >>> graph.evaluate(logprobs_N, [weights_N], backward=True).gradient
    """

    def __init__(self, inputs: Sequence[CustomLossInput], parsed: ParsedGraph) -> None:
        self.input_names = tuple(one.name for one in inputs[1:])
        self.ranks: Mapping[str, int] = {one.name: one.rank for one in inputs}
        self._parsed = parsed

    @classmethod
    def parse(cls, graph: Mapping[str, object], inputs: Sequence[CustomLossInput]) -> LossGraph:
        """Parses the wire format; raises ``InvalidInput``, which names the node and what is not allowed."""
        return cls(inputs, read_graph(graph, inputs))

    def evaluate(
        self,
        logprobs: Tensor,
        inputs: Sequence[Tensor],
        *,
        backward: bool,
        effort: PassEffort | None = None,
    ) -> DatumLoss:
        """The loss of one datum, with ``backward`` also its gradient; ``inputs`` in the order of ``input_names``.

        ``effort`` is the budget of its pass; by default, the datum is a pass of its own. Raises ``InvalidInput``, which names the node that cannot be computed and the shapes of its arguments. The caller
        checks whether the numbers are finite.
        """
        leaf = logprobs.detach().clone().requires_grad_(backward)
        with torch.set_grad_enabled(backward):
            loss, metrics = self._run(leaf, inputs, effort or PassEffort(num_tokens=len(leaf)))
        gradient = _differentiate(loss, leaf) if backward else None
        return DatumLoss(float(loss.detach()), metrics, gradient)

    def _run(
        self, logprobs: Tensor, inputs: Sequence[Tensor], effort: PassEffort
    ) -> tuple[Tensor, dict[str, float]]:
        values: dict[str, Any] = dict(zip(self._parsed.placeholders, (logprobs, *inputs), strict=True))
        effort.next_datum()
        for node in self._parsed.nodes:
            values[node.name] = _compute(node, values, effort)
        loss = values[self._parsed.loss]
        if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.is_floating_point():
            raise graph_error(
                f"its loss, node {self._parsed.loss!r}, is {_describe(loss)}; return a tensor with no dimensions"
            )
        metrics = {name: _metric(name, values[node]) for name, node in self._parsed.metrics.items()}
        return loss, metrics


def _compute(node: GraphNode, values: Mapping[str, Any], effort: PassEffort) -> Any:
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    try:
        args, kwargs = substitute(node.args, values), substitute(dict(node.kwargs), values)
        if node.op is None:
            return _attribute(*args)
        effort.spend(node.op.size(args, kwargs), node.op.slowness)
        if node.op.plain:
            _check_operands(node.target, args)
        result = node.op.call(*args, **kwargs)
        _check_result(result)
    except OP_ERRORS as error:
        if is_out_of_memory(error):
            raise
        shapes = ", ".join(_describe(value) for value in (*args, *kwargs.values()))
        reason = str(error).strip().partition("\n")[0][:300]
        raise graph_error(f"{node} cannot be computed: {reason} (its arguments: {shapes[:300]})") from error
    return result


def _differentiate(loss: Tensor, leaf: Tensor) -> Tensor:
    if not loss.requires_grad:
        return torch.zeros_like(leaf)  # every path from the logprobs to the loss is detached
    try:
        (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise graph_error(
            f"its loss cannot be differentiated: {str(error).partition(chr(10))[0][:300]}"
        ) from error
    return torch.zeros_like(leaf) if gradient is None else gradient


def _attribute(value: Any, name: str) -> Any:
    if name == "data" and isinstance(value, Tensor):
        return value.detach()
    if name in {"values", "indices"} and not (isinstance(value, tuple) and hasattr(value, name)):
        raise ValueError(f"only results with several parts have {name!r}")
    if name not in {"values", "indices"} and not isinstance(value, Tensor):
        raise ValueError(f"only tensors have {name!r}")
    return getattr(value, name)


def _check_operands(target: str, args: Sequence[Any]) -> None:
    """Rejects operands that are not tensors or numbers: Python's operators on sequences and strings have no bounds."""
    if target.endswith(".getitem"):
        if not isinstance(args[0], Tensor | tuple | list):
            raise ValueError("only tensors, shapes and sequences of results can be indexed")
        return
    sequences = [arg for arg in args if isinstance(arg, tuple | list)]
    if target.endswith(".add") and len(sequences) == len(args):
        if sum(len(sequence) for sequence in sequences) > _MAX_SEQUENCE_LENGTH:
            raise ValueError("it concatenates sequences into one that is too long")
        return
    if not all(isinstance(arg, Tensor | int | float) for arg in args):
        raise ValueError("operators take tensors and numbers")


def _check_result(result: Any) -> None:
    if isinstance(result, list | tuple):
        if len(result) > _MAX_SEQUENCE_LENGTH:
            raise ValueError(f"it has {len(result)} results")
        for part in result:
            _check_result(part)
    elif isinstance(result, Tensor):
        if result.is_complex() or result.layout != torch.strided or result.device.type != "cpu":
            raise ValueError(f"its result is of dtype {result.dtype}, which is not allowed")
        if result.ndim > MAX_DIMENSIONS:
            raise ValueError(f"its result has {result.ndim} dimensions; at most {MAX_DIMENSIONS} are allowed")
    elif isinstance(result, int):
        if not -INTEGER_LIMIT < result < INTEGER_LIMIT:
            raise ValueError("its result does not fit into 64 bits")
    elif not isinstance(result, float | torch.dtype | torch.device):
        raise ValueError(f"its result is a {type(result).__name__}, which is not allowed")


def _metric(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.detach().item()
    if not isinstance(value, int | float):
        raise graph_error(f"its metric {name!r} is {_describe(value)}; return a tensor with no dimensions")
    return float(value)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    if isinstance(value, list | tuple) and any(True for _ in tensors_in(value)):
        return f"[{', '.join(_describe(part) for part in value[:4])}]"
    return repr(value)[:80]
