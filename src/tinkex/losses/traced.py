"""Losses as graphs: a function is traced once, checked, and serialized so that a server can run it.

The function receives one datum at a time: the logprobs of its targets, and the ``loss_fn_inputs`` that it names as
parameters. ``torch.fx`` records its operations; the recorded graph runs, here or on the server, never the function
itself.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, Final, TypeAlias

from tinkex.losses.custom import require_torch
from tinkex.types import CustomLossGraph, CustomLossInput, CustomLossInputRank, CustomLossNode, Datum

if TYPE_CHECKING:
    import torch
    import torch.fx

__all__ = ["LossHandle", "PerDatumLossFn", "check_inputs", "run_handle", "trace_loss", "write_graph"]

PerDatumLossFn: TypeAlias = Callable[
    Concatenate["torch.Tensor", ...], tuple["torch.Tensor", Mapping[str, "torch.Tensor"]]
]
"""Takes the logprobs of one datum and its named inputs; returns the loss and metrics, all as tensors."""

MAX_INPUTS: Final = 16
_INPUT_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC_NAME: Final = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_LIBRARIES: Final = frozenset({"torch", "math", "operator", "_operator"})
_LEAVES_TORCH: Final = frozenset({"item", "numpy", "tolist"})


@dataclass(frozen=True)
class LossHandle:
    """A registered loss of a session, from ``ServiceClient.create_custom_loss``.

    Pass it to ``TrainingClient.forward_backward_custom`` instead of a function. Only clients of the session
    that created it can use it.
    """

    name: str
    inputs: tuple[CustomLossInput, ...]
    """``logprobs``, then the ``loss_fn_inputs`` the loss reads, in the order of its parameters."""
    session_id: str
    graph: torch.fx.GraphModule = field(repr=False, compare=False)
    loss_id: str | None = None
    """The server's id of the loss; None if the loss runs in this process."""

    @property
    def key(self) -> str:
        """The SHA-256 of the graph's code and inputs: equal for equal losses."""
        return hashlib.sha256(self.graph.code.encode() + repr(self.inputs).encode()).hexdigest()

    @property
    def input_names(self) -> tuple[str, ...]:
        """The ``loss_fn_inputs`` the loss reads, in the order of its parameters."""
        return tuple(one.name for one in self.inputs[1:])


# ---- tracing ----


def trace_loss(
    fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank], session_id: str = ""
) -> LossHandle:
    """Traces a loss; raises ``ValueError`` for a function that cannot run as a graph.

    >>> def neg_ll(logprobs, weights):
    ...     loss = -(logprobs * weights).sum()
    ...     return loss, {"custom/neg_ll:sum": loss}
    >>> trace_loss(neg_ll, {"logprobs": 1, "weights": 1}).input_names
    ('weights',)
    """
    require_torch()
    from torch.fx import symbolic_trace

    name = _name_of(fn)
    inputs = _inputs(name, fn, input_ranks)
    try:
        graph = symbolic_trace(fn)
    except Exception as error:
        raise ValueError(
            f"create_custom_loss: torch.fx cannot trace {name} ({error}); a loss must run the same operations for "
            "all values: use torch.where instead of if, torch.nn.functional instead of modules, and no libraries "
            "besides torch and math"
        ) from error
    for node in graph.graph.nodes:
        _check_node(name, node)
    return LossHandle(name, inputs, session_id, graph)


def _name_of(fn: Any) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))


def _inputs(
    name: str, fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank]
) -> tuple[CustomLossInput, ...]:
    parameters = inspect.signature(fn).parameters
    names = list(parameters)
    if names[:1] != ["logprobs"]:
        raise _invalid(
            name, "does not have logprobs as its first parameter; write def loss(logprobs, advantages): …"
        )
    if len(names) > MAX_INPUTS:
        raise _invalid(name, f"has {len(names)} parameters; a loss has at most {MAX_INPUTS}, with logprobs")
    for parameter in parameters.values():
        if not _INPUT_NAME.fullmatch(parameter.name):
            raise _invalid(
                name, f"has a parameter {parameter.name!r}; use a to z, 0 to 9 and _, at most 64 characters"
            )
        if parameter.kind not in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}:
            raise _invalid(name, f"takes {parameter.name!r} by star or keyword; name every input explicitly")
        if parameter.default is not parameter.empty:
            raise _invalid(
                name, f"has a default for {parameter.name!r}; every datum must have every input, so remove it"
            )
    if set(input_ranks) != set(names):
        raise _invalid(
            name,
            f"has the parameters {', '.join(names)}; input_ranks must give a rank for each and no other, "
            f"got {', '.join(sorted(map(str, input_ranks))) or 'none'}",
        )
    for given, rank in input_ranks.items():
        if isinstance(rank, bool) or rank not in {0, 1, 2} or (given == "logprobs" and rank == 0):
            allowed = "1 ([T]) or 2 ([T, K])" if given == "logprobs" else "0, 1 ([T]) or 2 ([T, K])"
            raise _invalid(name, f"has {given} of rank {rank!r}; it must be {allowed}")
    return tuple(CustomLossInput(name=given, rank=input_ranks[given]) for given in names)


def _check_node(name: str, node: torch.fx.Node) -> None:
    target = node.target
    match node.op:
        case "call_function":
            module = str(getattr(target, "__module__", None) or "")
            if target is not getattr and module.partition(".")[0] not in _LIBRARIES:
                called = getattr(target, "__qualname__", target)
                raise _invalid(
                    name, f"calls {called} of {module or 'an unknown module'}; use torch and math only"
                )
        case "call_method":
            _check_method(name, str(target))
        case "call_module":
            raise _invalid(
                name, f"calls the module {target}; use functions such as those of torch.nn.functional"
            )
        case "get_attr":
            raise _invalid(
                name,
                f"captures a tensor ({target}); pass tensors as loss_fn_inputs, and numbers as numbers",
            )
        case "output":
            _check_graph_output(name, node.args[0])


def _check_method(name: str, method: str) -> None:
    import torch

    if not hasattr(torch.Tensor, method):
        raise _invalid(name, f"calls {method}(), which tensors do not have")
    if method == "backward":
        raise _invalid(
            name, "calls backward(); return the loss, and forward_backward_custom computes its gradient"
        )
    if method in _LEAVES_TORCH:
        raise _invalid(name, f"calls {method}(), which returns no tensor; keep metrics as tensors too")


def _check_graph_output(name: str, output: Any) -> None:
    import torch.fx

    if not isinstance(output, tuple | list) or len(output) != 2:
        raise _invalid(name, "does not return (loss, metrics), such as (loss, {})")
    loss, metrics = output
    if not isinstance(loss, torch.fx.Node):
        raise _invalid(name, f"returns the loss {loss!r}; it must be a tensor computed from the inputs")
    if not isinstance(metrics, dict):
        raise _invalid(name, f"returns {type(metrics).__name__} as metrics; return a dict")
    for key, value in metrics.items():
        if not isinstance(key, str) or not _METRIC_NAME.fullmatch(key):
            raise _invalid(
                name,
                f"has a metric {key!r}; name it custom/<name>:sum or custom/<name>:mean, in lower case",
            )
        if not isinstance(value, torch.fx.Node):
            raise _invalid(
                name,
                f"has a metric {key!r} with the value {value!r}; it must be a tensor computed from the inputs",
            )


def _invalid(name: str, what: str) -> ValueError:
    return ValueError(f"create_custom_loss: {name} {what}")


# ---- serialization ----


def write_graph(handle: LossHandle) -> CustomLossGraph:
    """Serializes the graph, format 1: one entry per node, in order."""
    from torch.fx.node import _get_qualified_name

    nodes = []
    for node in handle.graph.graph.nodes:
        target = str(node.target)
        if node.op == "call_function":
            # Operators such as + are in a private module; the format uses the public one.
            target = re.sub(r"^_operator\.", "operator.", _get_qualified_name(node.target))
        nodes.append(
            CustomLossNode(
                op=node.op,
                name=node.name,
                target=target,
                args=[_encode_argument(handle.name, one) for one in node.args],
                kwargs={key: _encode_argument(handle.name, one) for key, one in node.kwargs.items()},
            )
        )
    return CustomLossGraph(nodes=nodes)


def _encode_argument(name: str, value: Any) -> Any:
    """Encodes an argument of a node: a JSON value as it is, anything else as an object whose one key is its kind."""
    import torch
    import torch.fx

    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case torch.fx.Node():
            return {"ref": value.name}
        case tuple():
            return {"tuple": [_encode_argument(name, one) for one in value]}
        case list():
            return [_encode_argument(name, one) for one in value]
        case dict() if all(isinstance(key, str) for key in value):
            return {"dict": {key: _encode_argument(name, one) for key, one in value.items()}}
        case slice():
            return {"slice": [_encode_argument(name, one) for one in (value.start, value.stop, value.step)]}
    if value is ...:
        return {"ellipsis": True}
    for kind in (torch.dtype, torch.device, torch.layout, torch.memory_format):
        if isinstance(value, kind):
            return {kind.__name__: str(value).removeprefix("torch.")}
    raise _invalid(
        name,
        f"passes a {type(value).__name__} to an operation, which graphs cannot represent; use numbers or tensors",
    )


# ---- local execution ----


def check_inputs(handle: LossHandle, data: Sequence[Datum]) -> None:
    """Raises ``ValueError`` for data that lacks an input of the loss, or has one of the wrong rank."""
    for index, datum in enumerate(data):
        for one in handle.inputs:
            # the logprobs have the shape of their targets
            key = "target_tokens" if one is handle.inputs[0] else one.name
            given = datum.loss_fn_inputs.get(key)
            if given is None:
                raise ValueError(f"data[{index}] has no {key}, which the loss {handle.name!r} reads")
            rank = 1 if given.shape is None else len(given.shape)
            if rank != one.rank:
                raise ValueError(
                    f"{key} of data[{index}] has rank {rank}; the loss {handle.name!r} was traced for "
                    f"{one.name} of rank {one.rank}"
                )


def run_handle(
    handle: LossHandle, data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Returns the summed loss of all datums, and their metrics reduced by the suffixes of their names."""
    losses: list[torch.Tensor] = []
    metrics: dict[str, float] = {}
    for datum, one in zip(data, logprobs, strict=True):
        loss, found = handle.graph(
            one, *(datum.loss_fn_inputs[name].to_torch() for name in handle.input_names)
        )
        if loss.ndim != 0:
            raise ValueError(
                f"the loss {handle.name!r} returned a tensor of shape {tuple(loss.shape)}; sum or average it to one number"
            )
        losses.append(loss)
        for key, value in found.items():
            metrics[key] = metrics.get(key, 0.0) + float(value.detach())
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total, {
        key: value / len(losses) if key.endswith(":mean") else value for key, value in metrics.items()
    }
