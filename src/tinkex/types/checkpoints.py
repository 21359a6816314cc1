"""Saved weights: paths, requests to save and load, and what is known about a checkpoint."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from tinkex.types.base import Value

__all__ = [
    "Checkpoint",
    "CheckpointType",
    "CheckpointsListResponse",
    "LoadWeightsRequest",
    "LoadWeightsResponse",
    "ParsedCheckpointTinkerPath",
    "SaveWeightsForSamplerRequest",
    "SaveWeightsForSamplerResponse",
    "SaveWeightsRequest",
    "SaveWeightsResponse",
    "WeightsInfoRequest",
    "WeightsInfoResponse",
]

CheckpointType = Literal["training", "sampler", "external"]

KINDS: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


class Cursor(Value, frozen=True, kw_only=True):
    """Where a page of a listing lies."""

    offset: int
    limit: int
    total_count: int


class ParsedCheckpointTinkerPath(Value, frozen=True, kw_only=True):
    """The parts of ``tinker://<run>/<weights|sampler_weights|external_weights>/<name>``."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> ParsedCheckpointTinkerPath:
        """Takes a path apart, or raises ``ValueError`` that shows the right form.

        >>> ParsedCheckpointTinkerPath.from_tinker_path("tinker://run-7/weights/0010").checkpoint_id
        'weights/0010'
        """
        scheme = "tinker://"
        parts = tinker_path.removeprefix(scheme).split("/")
        if not tinker_path.startswith(scheme) or len(parts) != 3 or not all(parts) or parts[1] not in KINDS:
            raise ValueError(
                f"{tinker_path!r} is not a checkpoint path; "
                "they look like tinker://<run>/weights/<name> or tinker://<run>/sampler_weights/<name>"
            )
        run, kind, name = parts
        return cls(
            tinker_path=tinker_path,
            training_run_id=run,
            checkpoint_type=KINDS[kind],
            checkpoint_id=f"{kind}/{name}",
        )


class SaveWeightsRequest(Value, frozen=True, kw_only=True):
    """Saves weights and optimizer state under a name."""

    model_id: str
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(Value, frozen=True, kw_only=True):
    """Where the checkpoint is."""

    path: str
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSamplerRequest(Value, frozen=True, kw_only=True):
    """Saves weights for sampling: under a name, or unnamed as a sampler of its own."""

    model_id: str
    path: str | None = None
    sampling_session_seq_id: int | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponse(Value, frozen=True, kw_only=True):
    """The path of a named save, or the sampler of an unnamed one."""

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class LoadWeightsRequest(Value, frozen=True, kw_only=True):
    """Loads a checkpoint into a run, or (by session) makes a run from it."""

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    path: str
    optimizer: bool = False
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"


class LoadWeightsResponse(Value, frozen=True, kw_only=True):
    """Confirms what was loaded, and into which run."""

    path: str | None = None
    model_id: str | None = None
    type: Literal["load_weights"] = "load_weights"


class WeightsInfoRequest(Value, frozen=True, kw_only=True):
    """Asks what a checkpoint holds."""

    tinker_path: str


class WeightsInfoResponse(Value, frozen=True, kw_only=True):
    """What is needed to make a run that the checkpoint fits."""

    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    optimizer_config: dict[str, Any] | None = None


class Checkpoint(Value, frozen=True, kw_only=True):
    """One saved set of weights."""

    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, Any] | None = None
    expires_at: datetime | None = None


class CheckpointsListResponse(Value, frozen=True, kw_only=True):
    """A page of checkpoints."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None
