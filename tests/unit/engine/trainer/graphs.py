"""Graphs of losses for tests: traced from functions as clients do it, or written node by node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tinkex.engine.trainer.loss_graph import LossGraph
from tinkex.losses.traced import trace_loss, write_graph
from tinkex.types.custom_losses import CustomLossInput


def inputs_of(**ranks: int) -> list[CustomLossInput]:
    """The declared inputs of a loss, the logprobs first."""
    return [CustomLossInput(name=name, rank=rank) for name, rank in ranks.items()]  # type: ignore[arg-type]


def traced(fn: Callable[..., Any], **ranks: int) -> LossGraph:
    """The loss a client would upload for this function."""
    written = write_graph(trace_loss(fn, ranks, "session"))  # type: ignore[arg-type]
    return LossGraph.parse(msgspec.to_builtins(written), inputs_of(**ranks))


def node(op: str, name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """One node as it travels."""
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def ref(name: str) -> dict[str, str]:
    """The result of another node, as an argument."""
    return {"ref": name}


def written(
    *steps: Mapping[str, Any], loss: str = "loss", metrics: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A graph of ``logprobs`` alone: these steps, then the sum of the logprobs as loss."""
    return {
        "format": 1,
        "nodes": [
            node("placeholder", "logprobs", "logprobs"),
            *steps,
            node("call_method", "loss", "sum", ref("logprobs")),
            node("output", "output", "output", {"tuple": [ref(loss), {"dict": dict(metrics or {})}]}),
        ],
    }


def using(*steps: Mapping[str, Any]) -> dict[str, Any]:
    """As ``written``, with the last step as a metric, so that all of them run."""
    return written(*steps, metrics={"custom/last:sum": ref(str(steps[-1]["name"]))})
