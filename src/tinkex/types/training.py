"""Models under training: their settings, operations and what those return."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

from tinkex.types.base import Options, Value

__all__ = [
    "AdamOptimizerConfig",
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
    "OptimizerConfig",
    "UnloadModelRequest",
    "UnloadModelResponse",
]

ModelID: TypeAlias = str


class LoraConfig(Options, frozen=True, kw_only=True):
    """Which low-rank adapter to train."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"LoRA rank must be at least 1, got {self.rank}")
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise ValueError("LoRA needs at least one of train_mlp, train_attn and train_unembed")


class AdamOptimizerConfig(Value, frozen=True, kw_only=True):
    """AdamW, the default optimizer."""

    type: Literal["adamw"] = "adamw"


OptimizerConfig: TypeAlias = dict[str, Any]
"""What travels: ``{"type": "adamw"}`` or another family with its own fields."""


class AdamParams(Options, frozen=True, kw_only=True):
    """The settings of one AdamW step; ``grad_clip_norm`` 0 means no clipping.

    >>> AdamParams(learning_rate=1e-3).beta2
    0.95
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"AdamParams.{name} must be a finite number ≥ 0, got {value}")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"AdamParams.{name} must lie in [0, 1), got {value}")
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise ValueError(f"AdamParams.eps must be a finite number > 0, got {self.eps}")


class CreateModelRequest(Value, frozen=True, kw_only=True):
    """A new run: a base model with a fresh adapter."""

    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    type: Literal["create_model"] = "create_model"


class CreateModelResponse(Value, frozen=True, kw_only=True):
    """The id of the new run."""

    model_id: ModelID
    type: Literal["create_model"] = "create_model"


class OptimStepRequest(Value, frozen=True, kw_only=True):
    """Applies the accumulated gradient; exactly one kind of parameters is set."""

    model_id: ModelID
    seq_id: int | None = None
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None
    type: Literal["optim_step"] = "optim_step"


class OptimStepResponse(Value, frozen=True, kw_only=True):
    """What the optimizer reports, such as the norm of the gradient before clipping."""

    metrics: dict[str, float] | None = None


class GetInfoRequest(Value, frozen=True, kw_only=True):
    """Asks what a run is."""

    model_id: ModelID
    type: Literal["get_info"] = "get_info"


class ModelData(Value, frozen=True, kw_only=True):
    """The base model of a run."""

    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class GetInfoResponse(Value, frozen=True, kw_only=True):
    """What a run is: base model, adapter, optimizer."""

    model_data: ModelData
    model_id: ModelID
    optimizer_config: OptimizerConfig | None = None
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None
    type: Literal["get_info"] = "get_info"


class UnloadModelRequest(Value, frozen=True, kw_only=True):
    """Frees the live weights of a run."""

    model_id: ModelID
    type: Literal["unload_model"] = "unload_model"


class UnloadModelResponse(Value, frozen=True, kw_only=True):
    """Confirms that the run is no longer in memory."""

    model_id: ModelID
    type: Literal["unload_model"] = "unload_model"
