"""User-defined losses that a server runs: a traced graph and its inputs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tinkex.types.base import Options, Value

__all__ = [
    "CreateCustomLossRequest",
    "CreateCustomLossResponse",
    "CustomLossGraph",
    "CustomLossInput",
    "CustomLossInputRank",
    "CustomLossNode",
    "CustomLossNodeOp",
]

CustomLossInputRank = Literal[0, 1, 2]
CustomLossNodeOp = Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]


class CustomLossInput(Options, frozen=True, kw_only=True):
    """One input of the loss, and its number of dimensions."""

    name: str
    rank: CustomLossInputRank


class CustomLossNode(Options, frozen=True, kw_only=True):
    """One node of the graph."""

    op: CustomLossNodeOp
    name: str
    target: str
    args: list[Any] = msgspec.field(default_factory=list)
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)


class CustomLossGraph(Options, frozen=True, kw_only=True):
    """The nodes, in order."""

    format: Literal[1] = 1
    nodes: list[CustomLossNode]


class CreateCustomLossRequest(Options, frozen=True, kw_only=True):
    """Registers a loss with a session."""

    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[CustomLossInput]
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(Value, frozen=True, kw_only=True):
    """The id by which a pass refers to the loss."""

    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"
