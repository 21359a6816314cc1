"""Losses: names, and the requests and results of forward and backward passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tinkex.types.display import html_table, show_fields
from tinkex.types.inputs import Datum
from tinkex.types.tensors import TensorData

__all__ = [
    "ForwardBackwardInput",
    "ForwardBackwardOutput",
    "ForwardBackwardRequest",
    "ForwardRequest",
    "LossFnConfig",
    "LossFnOutput",
    "LossFnType",
]

LossFnType = Literal[
    "cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce", "custom"
]
LossFnOutput: TypeAlias = dict[str, TensorData]
LossFnConfig: TypeAlias = dict[str, float | str]


@dataclass(frozen=True)
class ForwardBackwardInput:
    """The data of one forward or backward pass, and the loss to apply."""

    data: list[Datum]
    loss_fn: LossFnType
    loss_fn_config: Mapping[str, float | str] | None = None


@dataclass(frozen=True)
class ForwardBackwardRequest:
    """One chunk of a forward or backward pass of a model."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss_fn: str
    loss_fn_config: LossFnConfig | None = None
    forward_only: bool = False


@dataclass(frozen=True)
class ForwardRequest:
    """A forward pass in JSON, from clients without protobuf."""

    forward_input: ForwardBackwardInput
    model_id: str
    seq_id: int | None = None


@dataclass(frozen=True, repr=False)
class ForwardBackwardOutput:
    """The outputs of the loss per datum, and metrics named ``name:reduction``.

    ``loss_fn_outputs[i]["logprobs"]`` has the shape of datum i's ``target_tokens``.
    """

    loss_fn_output_type: str
    loss_fn_outputs: list[LossFnOutput]
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        """The loss of the pass: the metric ``loss:sum``, or ``loss`` of servers without reductions; None without either.

        >>> ForwardBackwardOutput("CrossEntropyLossReturn", [], {"loss:sum": 2.5}).loss
        2.5
        """
        return self.metrics.get("loss:sum", self.metrics.get("loss"))

    def __repr__(self) -> str:
        return show_fields(self, ("loss_fn_output_type", "loss_fn_outputs", "metrics"))

    def _repr_html_(self) -> str:
        title = f"ForwardBackwardOutput of {len(self.loss_fn_outputs)} datum{'' if len(self.loss_fn_outputs) == 1 else 's'}"
        return html_table(title, ("metric", "value"), list(self.metrics.items()))
