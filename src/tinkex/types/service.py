"""Sessions, server capabilities, and the configuration of clients by the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from tinkex.types.base import Options, Value
from tinkex.types.coercion import coerce

__all__ = [
    "AuthTokenResponse",
    "ClientConfigRequest",
    "ClientConfigResponse",
    "ClientDynamicConfigResponse",
    "CreateSessionRequest",
    "CreateSessionResponse",
    "FinishSessionRequest",
    "GetServerCapabilitiesResponse",
    "GetSessionResponse",
    "HealthResponse",
    "ListSessionsResponse",
    "SessionHeartbeatRequest",
    "SessionHeartbeatResponse",
    "SupportedModel",
    "WhoamiResponse",
]


class ClientConfigRequest(Value, frozen=True, kw_only=True):
    """Identifies the client."""

    sdk_version: str | None = None


class ClientConfigResponse(Value, frozen=True, kw_only=True):
    """The server's settings for its clients; missing ones have these defaults."""

    pjwt_auth_enabled: bool = False
    credential_default_source: str = "api_key"
    sample_dispatch_bytes_semaphore_size: int = 10 * 1024 * 1024
    inflight_response_bytes_semaphore_size: int = 50 * 1024 * 1024
    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    fwdbwd_dispatch_bytes_semaphore_size: int = 50_000_000
    billing_exception_max_pause_duration_sec: float = 3600.0
    sample_no_retries: bool = False
    sample_enable_stuck_detection: bool = True
    sample_max_concurrent_requests: int = 2000
    use_pyqwest_transport: bool = True
    create_model_via_load_weights: bool = False
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False
    sampling_extensions: list[str] | None = None
    """The fields of our extension of ``SamplingParams`` that the server reads; others are not sent to it."""
    training_extensions: list[str] | None = None
    """What the server stores of training loops: ``metrics``, ``rollouts``; others are not sent to it."""


class ClientDynamicConfigResponse(Value, frozen=True, kw_only=True):
    """Settings that a server may change while clients run."""

    refresh_interval_sec: float = 300.0
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class CreateSessionRequest(Options, frozen=True, kw_only=True):
    """Opens a session, which represents one program on the server."""

    tags: list[str] = msgspec.field(default_factory=list)
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class CreateSessionResponse(Value, frozen=True, kw_only=True):
    """The id of the session, and messages for the user."""

    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    type: Literal["create_session"] = "create_session"


class SessionHeartbeatRequest(Value, frozen=True, kw_only=True):
    """Keeps the session alive."""

    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionHeartbeatResponse(Value, frozen=True, kw_only=True):
    """Acknowledges a heartbeat."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(Value, frozen=True, kw_only=True):
    """How the program ended."""

    type: Literal["success", "errored", "interrupted"]


class FinishSessionRequest(Options, frozen=True, kw_only=True):
    """Closes a session."""

    reason: FinishReason
    detail: str | None = None


class SupportedModel(Value, frozen=True, kw_only=True):
    """A base model of a server."""

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None
    model_id: str | None = None
    arch: str | None = None
    """The family of the architecture, such as ``llama``."""


if TYPE_CHECKING:
    ModelList: TypeAlias = list[SupportedModel]
else:
    ModelList = list[SupportedModel | str | None]  # what servers send


class GetServerCapabilitiesResponse(Value, frozen=True, kw_only=True):
    """The capabilities of a server; a model that the server sends as a bare name becomes a ``SupportedModel``.

    >>> GetServerCapabilitiesResponse.model_validate({"supported_models": ["toy", None]}).model_names()
    ['toy']
    """

    supported_models: ModelList

    def __post_init__(self) -> None:
        given: Any = self.supported_models
        if isinstance(given, list):
            named = ({"model_name": one} if isinstance(one, str) else one for one in given)
            models = [SupportedModel.model_validate(one) for one in named if one is not None]
            msgspec.structs.force_setattr(self, "supported_models", models)
        coerce(self)

    def model_names(self) -> list[str]:
        """The names of the models, to pass as ``base_model``."""
        return [one.model_name for one in self.supported_models if one.model_name is not None]


class HealthResponse(Value, frozen=True, kw_only=True):
    """The health of a server."""

    status: str


class GetSessionResponse(Value, frozen=True, kw_only=True):
    """The runs and samplers of a session."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


class ListSessionsResponse(Value, frozen=True, kw_only=True):
    """Session ids, newest first."""

    sessions: list[str]


class WhoamiResponse(Value, frozen=True, kw_only=True):
    """The identity of the caller."""

    user_urn: str
    org_urn: str
    email: str | None = None


class AuthTokenResponse(Value, frozen=True, kw_only=True):
    """A short-lived token for an API key."""

    jwt: str

    def __repr__(self) -> str:
        return "AuthTokenResponse(jwt='…')"


class AssignProjectRequest(Options, frozen=True, kw_only=True):
    """Moves a session into a project."""

    project_id: str


class TraceExportResponse(Value, frozen=True, kw_only=True):
    """The status of a session's trace export, and its URL."""

    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None
