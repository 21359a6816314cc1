"""Checkpoints: paths, requests to save and load, and descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from tinkex.types.base import Options, Value
from tinkex.types.optimizers import AdamOptimizerConfig, OptimizerConfigBase

__all__ = [
    "Checkpoint",
    "CheckpointType",
    "CheckpointsListResponse",
    "CopyWeightsRequest",
    "CopyWeightsResponse",
    "Cursor",
    "ExternalWeightsUrlsResponse",
    "LoadWeightsRequest",
    "LoadWeightsResponse",
    "ParsedCheckpointTinkerPath",
    "SamplingClientKind",
    "SaveWeightsExternalRequest",
    "SaveWeightsExternalResponse",
    "SaveWeightsExternalResponseInternal",
    "SaveWeightsForSamplerRequest",
    "SaveWeightsForSamplerResponse",
    "SaveWeightsForSamplerResponseInternal",
    "SaveWeightsRequest",
    "SaveWeightsResponse",
    "WeightsInfoRequest",
    "WeightsInfoResponse",
]

CheckpointType = Literal["training", "sampler", "external"]

SamplingClientKind = Literal["snapshot", "inflight"]
"""Which weights an unnamed save for sampling publishes.

``snapshot``: fixed ones. ``inflight``: those that all inflight sampling clients of one run share. Every inflight save replaces them, for
clients that exist as well as for new ones; a sample uses the newest ones there are when it starts.
"""

CONSOLE = "https://tinker.thinkingmachines.ai"
"""The web pages of the hosted service."""

KINDS: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


class Cursor(Value, frozen=True, kw_only=True):
    """The position of a page in a listing."""

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
        """Parses a path; raises ``ValueError`` that shows the expected form.

        >>> ParsedCheckpointTinkerPath.from_tinker_path("tinker://run-7/weights/0010").checkpoint_id
        'weights/0010'
        """
        scheme = "tinker://"
        parts = tinker_path.removeprefix(scheme).split("/")
        if not tinker_path.startswith(scheme) or len(parts) != 3 or not all(parts) or parts[1] not in KINDS:
            raise ValueError(
                f"{tinker_path!r} is not a checkpoint path; "
                "use tinker://<run>/weights/<name> or tinker://<run>/sampler_weights/<name>"
            )
        run, kind, name = parts
        return cls(
            tinker_path=tinker_path,
            training_run_id=run,
            checkpoint_type=KINDS[kind],
            checkpoint_id=f"{kind}/{name}",
        )


class SaveWeightsRequest(Options, frozen=True, kw_only=True):
    """Saves weights and optimizer state under a name."""

    model_id: str
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(Value, frozen=True, kw_only=True):
    """The path of the checkpoint."""

    path: str
    type: Literal["save_weights"] | None = None

    def get_console_url(self) -> str:
        """Returns the URL of this checkpoint's page on the hosted service."""
        return console_url(self.path)


class SaveWeightsForSamplerRequest(Options, frozen=True, kw_only=True):
    """Saves weights for sampling: under a name, or unnamed as a new sampler."""

    model_id: str
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: SamplingClientKind | None = None
    """None is a snapshot, too; it is not sent, for servers of before 0.38."""
    seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponseInternal(Value, frozen=True, kw_only=True):
    """The server's reply: the path of a named save, or the sampler of an unnamed one."""

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = None


class SaveWeightsForSamplerResponse(Value, frozen=True, kw_only=True):
    """The path of the checkpoint."""

    path: str
    type: Literal["save_weights_for_sampler"] | None = None

    def get_console_url(self) -> str:
        """Returns the URL of this checkpoint's page on the hosted service."""
        return console_url(self.path)

    def get_playground_url(self) -> str:
        """Returns the URL of the hosted service's playground for this checkpoint."""
        return f"{CONSOLE}/playground?mode=checkpoint&checkpoint={quote(self.path, safe='')}"


class SaveWeightsExternalRequest(Options, frozen=True, kw_only=True):
    """Saves weights for use elsewhere, encrypted for the given recipients if there are any."""

    model_id: str
    path: str
    seq_id: int | None = None
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponseInternal(Value, frozen=True, kw_only=True):
    """The server's reply: the path of the exported checkpoint, and its size."""

    path: str | None = None
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = None


class SaveWeightsExternalResponse(Value, frozen=True, kw_only=True):
    """The path of the exported checkpoint, and its size."""

    path: str
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = None


class LoadWeightsRequest(Options, frozen=True, kw_only=True):
    """Loads a checkpoint into a run, or (by session) creates a run from it."""

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    path: str
    optimizer: bool = False
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: Mapping[str, Any] | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"


class LoadWeightsResponse(Value, frozen=True, kw_only=True):
    """Confirms what was loaded, and into which run."""

    path: str | None = None
    model_id: str | None = None
    type: Literal["load_weights"] | None = None


class WeightsInfoRequest(Options, frozen=True, kw_only=True):
    """Requests the description of a checkpoint."""

    tinker_path: str


class WeightsInfoResponse(Value, frozen=True, kw_only=True):
    """The settings of a run that can load the checkpoint."""

    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    optimizer_config: OptimizerConfigBase = msgspec.field(default_factory=AdamOptimizerConfig)


class CopyWeightsRequest(Options, frozen=True, kw_only=True):
    """Copies a checkpoint into a session or a project."""

    session_id: str | None = None
    model_seq_id: int | None = None
    destination_project_id: str | None = None
    source_path: str
    ttl_seconds: int | None = None
    weights_access_token: str | None = None

    def __repr__(self) -> str:
        shown = self.model_copy(update={"weights_access_token": "…"}) if self.weights_access_token else self
        return f"CopyWeightsRequest({', '.join(f'{k}={v!r}' for k, v in shown.model_dump().items())})"


class CopyWeightsResponse(Value, frozen=True, kw_only=True):
    """The path of the copy."""

    tinker_path: str


class SetCheckpointTTLRequest(Options, frozen=True, kw_only=True):
    """Sets the time to live of a checkpoint, from now; ``None`` keeps it until it is deleted."""

    ttl_seconds: int | None = None


class ExternalWeightsUrlsResponse(Value, frozen=True, kw_only=True):
    """A URL per file of an exported checkpoint, and their expiry."""

    urls: dict[str, str]
    expires: datetime


class CheckpointArchiveUrlResponse(Value, frozen=True, kw_only=True):
    """The URL of a checkpoint's archive, and its expiry."""

    url: str
    expires: datetime | None = None


class Checkpoint(Value, frozen=True, kw_only=True):
    """One checkpoint."""

    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, Any] | None = None
    expires_at: datetime | None = None
    base_model: str | None = None
    """The name of its base model; None from servers that do not send it."""

    @property
    def training_run_id(self) -> str | None:
        """The run of the checkpoint, from its path; None if the path is not one of a checkpoint."""
        try:
            return ParsedCheckpointTinkerPath.from_tinker_path(self.tinker_path).training_run_id
        except ValueError:
            return None


class CheckpointsListResponse(Value, frozen=True, kw_only=True):
    """A page of checkpoints."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


def console_url(tinker_path: str) -> str:
    """Returns the URL of a checkpoint's page on the hosted service."""
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    run, checkpoint = (quote(part, safe="") for part in (parsed.training_run_id, parsed.checkpoint_id))
    return f"{CONSOLE}/checkpoints/{run}/{checkpoint}"
