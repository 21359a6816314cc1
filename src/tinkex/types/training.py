"""Models in training: settings, requests and responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from tinkex.types.base import Options, SuggestingType, Value
from tinkex.types.coercion import coerce
from tinkex.types.optimizers import (
    AdamOptimizerConfig,
    AdamParams,
    OptimizerConfigBase,
    OptimParams,
    OptimParamsBase,
)

__all__ = [
    "AdamParams",
    "CreateModelRequest",
    "CreateModelResponse",
    "GetInfoRequest",
    "GetInfoResponse",
    "LoraConfig",
    "ModelData",
    "ModelID",
    "OptimStepRequest",
    "OptimStepResponse",
    "UnloadModelRequest",
    "UnloadModelResponse",
]

ModelID: TypeAlias = str


class LoraConfig(Options, frozen=True, kw_only=True, metaclass=SuggestingType):
    """The low-rank adapter to train."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def __post_init__(self) -> None:
        coerce(self)
        if self.rank < 1:
            raise ValueError(f"LoRA rank must be at least 1, got {self.rank}")
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise ValueError("LoRA needs at least one of train_mlp, train_attn and train_unembed")


class CreateModelRequest(Options, frozen=True, kw_only=True):
    """Creates a run: a base model with a new adapter."""

    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: Mapping[str, Any] = msgspec.field(default_factory=lambda: {"type": "adamw"})
    type: Literal["create_model"] = "create_model"


class CreateModelResponse(Value, frozen=True, kw_only=True):
    """The id of the new run."""

    model_id: ModelID
    type: Literal["create_model"] = "create_model"


class OptimStepRequest(Options, frozen=True, kw_only=True):
    """Applies the accumulated gradient; exactly one kind of parameters is set."""

    model_id: ModelID
    seq_id: int | None = None
    adam_params: AdamParams | None = None
    optimizer_params: Mapping[str, Any] | None = None
    type: Literal["optim_step"] = "optim_step"

    @property
    def optim_params(self) -> OptimParams:
        """The parameters, of either kind."""
        if self.adam_params is not None:
            return self.adam_params
        return OptimParamsBase.model_validate(self.optimizer_params)


class OptimStepResponse(Value, frozen=True, kw_only=True):
    """The optimizer's metrics, such as the gradient norm before clipping."""

    metrics: dict[str, float] | None = None


class GetInfoRequest(Value, frozen=True, kw_only=True):
    """Requests the description of a run."""

    model_id: ModelID
    type: Literal["get_info"] = "get_info"


class ModelData(Value, frozen=True, kw_only=True):
    """The base model of a run."""

    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class GetInfoResponse(Value, frozen=True, kw_only=True):
    """The description of a run: base model, adapter, optimizer."""

    type: Literal["get_info"] | None = None
    model_data: ModelData
    model_id: ModelID
    optimizer_config: OptimizerConfigBase = msgspec.field(default_factory=AdamOptimizerConfig)
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None


class UnloadModelRequest(Options, frozen=True, kw_only=True):
    """Frees the live weights of a run."""

    model_id: ModelID
    type: Literal["unload_model"] = "unload_model"


class UnloadModelResponse(Value, frozen=True, kw_only=True):
    """Confirms that the run is no longer in memory."""

    model_id: ModelID
    type: Literal["unload_model"] | None = None
