"""Losses written by users: a traced graph that is read as data, checked, and run by an interpreter.

Nothing of the graph is ever executed as code. Every node is an operation of the allow-list, applied to the results
of earlier nodes; a budget bounds what one datum can cost in memory and time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.trainer.loss_arguments import MOST_DIGITS, fill
from tinkex.engine.trainer.loss_parsing import ParsedGraph, Step, read_graph, refused
from tinkex.engine.trainer.loss_sizes import Cost, tensors_in
from tinkex.types.custom_losses import CustomLossInput

__all__ = ["DatumLoss", "LossGraph"]

MOST_ELEMENTS = 2**24  # of one result
MOST_ELEMENTS_IN_ALL = 2**26  # of the results of one datum, which the backward pass may all need
MOST_EFFORT = 2**28  # elements touched for one datum
BASE_EFFORT = 2**22  # of a datum however small, so that many small ones cannot take long
EFFORT_PER_ELEMENT = 2**16  # of its inputs; the pairs of all its tokens, and more
MOST_DIMENSIONS = 8
_LONGEST_SEQUENCE = 2**16  # of shapes and of several results

_OPERATION_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class DatumLoss:
    """What a graph says of one datum: its loss, its metrics, and the derivative of the loss by each logprob."""

    loss: float
    metrics: Mapping[str, float]
    gradient: Tensor | None


class LossGraph:
    """A loss that a user traced and uploaded, ready to run on one datum after the other.

    ``input_names`` are the ``loss_fn_inputs`` it reads besides the logprobs, and ``ranks`` the dimensions of every
    input, the logprobs first.

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
        """The graph of the wire format; an ``InvalidInput`` names the node and what of it is not allowed."""
        return cls(inputs, read_graph(graph, inputs))

    def evaluate(self, logprobs: Tensor, inputs: Sequence[Tensor], *, backward: bool) -> DatumLoss:
        """The loss of one datum, with ``backward`` also its gradient; ``inputs`` in the order of ``input_names``.

        An ``InvalidInput`` names the node that cannot be computed and the shapes it was given. Whether the numbers are
        finite is for the caller to check.
        """
        leaf = logprobs.detach().clone().requires_grad_(backward)
        with torch.set_grad_enabled(backward):
            loss, metrics = self._run(leaf, inputs)
        gradient = _differentiate(loss, leaf) if backward else None
        return DatumLoss(float(loss.detach()), metrics, gradient)

    def _run(self, logprobs: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        values: dict[str, Any] = dict(zip(self._parsed.places, (logprobs, *inputs), strict=True))
        budget = _Budget(sum(tensor.numel() for tensor in (logprobs, *inputs)))
        for step in self._parsed.steps:
            values[step.name] = _compute(step, values, budget)
        loss = values[self._parsed.loss]
        if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.is_floating_point():
            raise refused(
                f"its loss, node {self._parsed.loss!r}, is {_described(loss)}; return a tensor with no dimensions"
            )
        metrics = {name: _metric(name, values[node]) for name, node in self._parsed.metrics.items()}
        return loss, metrics


class _Budget:
    """What is left for one datum."""

    def __init__(self, num_elements: int) -> None:
        self._elements = MOST_ELEMENTS_IN_ALL
        self._effort = min(MOST_EFFORT, BASE_EFFORT + EFFORT_PER_ELEMENT * num_elements)

    def spend(self, cost: Cost) -> None:
        """Takes the cost of a step, or says that there is not enough left for it."""
        if cost.elements > MOST_ELEMENTS:
            raise ValueError(
                f"its result can have {cost.elements} elements; at most {MOST_ELEMENTS} are allowed"
            )
        self._elements -= max(0, cost.elements)
        self._effort -= max(1, cost.effort)
        if self._elements < 0 or self._effort < 0:
            raise ValueError("with it, the loss of one datum takes more memory or time than is allowed")


def _compute(step: Step, values: Mapping[str, Any], budget: _Budget) -> Any:
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    try:
        args, kwargs = fill(step.args, values), fill(dict(step.kwargs), values)
        if step.operation is None:
            return _attribute(*args)
        budget.spend(step.operation.size(args, kwargs))
        if step.operation.plain:
            _check_operands(step.target, args)
        result = step.operation.call(*args, **kwargs)
        _check_result(result)
    except _OPERATION_ERRORS as error:
        if "can't allocate memory" in str(error):
            raise
        shapes = ", ".join(_described(value) for value in (*args, *kwargs.values()))
        reason = str(error).strip().partition("\n")[0][:300]
        raise refused(f"{step} cannot be computed: {reason} (its arguments: {shapes[:300]})") from error
    return result


def _differentiate(loss: Tensor, leaf: Tensor) -> Tensor:
    if not loss.requires_grad:
        return torch.zeros_like(leaf)  # every way from the logprobs to the loss is detached
    try:
        (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    except RuntimeError as error:
        if "can't allocate memory" in str(error):
            raise
        raise refused(
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
    """Python's operators do more with sequences and texts than a loss needs, and without bounds."""
    if target.endswith(".getitem"):
        if not isinstance(args[0], Tensor | tuple | list):
            raise ValueError("only tensors, shapes and several results can be indexed")
        return
    sequences = [arg for arg in args if isinstance(arg, tuple | list)]
    if target.endswith(".add") and len(sequences) == len(args):
        if sum(len(sequence) for sequence in sequences) > _LONGEST_SEQUENCE:
            raise ValueError("it joins sequences to one that is too long")
        return
    if not all(isinstance(arg, Tensor | int | float) for arg in args):
        raise ValueError("operators take tensors and numbers")


def _check_result(result: Any) -> None:
    if isinstance(result, list | tuple):
        if len(result) > _LONGEST_SEQUENCE:
            raise ValueError(f"it has {len(result)} results")
        for part in result:
            _check_result(part)
    elif isinstance(result, Tensor):
        if result.is_complex() or result.layout != torch.strided or result.device.type != "cpu":
            raise ValueError(f"its result is of dtype {result.dtype}, which is not allowed")
        if result.ndim > MOST_DIMENSIONS:
            raise ValueError(
                f"its result has {result.ndim} dimensions; at most {MOST_DIMENSIONS} are allowed"
            )
    elif isinstance(result, int):
        if not -MOST_DIGITS < result < MOST_DIGITS:
            raise ValueError("its result does not fit 64 bits")
    elif not isinstance(result, float | torch.dtype | torch.device):
        raise ValueError(f"its result is a {type(result).__name__}, which is not allowed")


def _metric(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.detach().item()
    if not isinstance(value, int | float):
        raise refused(f"its metric {name!r} is {_described(value)}; return a tensor with no dimensions")
    return float(value)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    if isinstance(value, list | tuple) and any(True for _ in tensors_in(value)):
        return f"[{', '.join(_described(part) for part in value[:4])}]"
    return repr(value)[:80]
