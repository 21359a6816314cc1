"""The endpoint table: client calls and server routes are both built from it.

Every entry names the method, the path, the request type and the response type. ``result`` is set for operations
that finish later: the call itself returns an ``UntypedAPIFuture``, and ``retrieve_future`` returns the
result, in protobuf where ``result_wire`` says so. Entries with ``extension`` are not part of the official protocol.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast
from urllib.parse import quote

from tinkex import types

__all__ = [
    "ENDPOINTS",
    "SIGNED_UPLOAD",
    "SIGNED_URL",
    "Endpoint",
    "Purpose",
    "endpoint",
    "endpoint_at",
    "operation_of",
]

Purpose = Literal["session", "train", "sample", "retrieve", "rest", "telemetry", "download"]
"""Which connection pool a call uses, so that pending polls never delay a heartbeat or a submission."""

Wire = Literal["json", "proto", "multipart", "bytes"]


@dataclass(frozen=True)
class Endpoint:
    """One call of the protocol: its method, path, types and encodings."""

    name: str
    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    purpose: Purpose
    request: type[Any] | None = None
    response: type[Any] | None = None
    request_wire: Wire = "json"
    result: type[Any] | None = None
    result_wire: Wire = "json"
    request_type: str | None = None
    """The value of X-Tinker-Request-Type when the result is polled."""
    called_by_us: bool = True
    """False for calls that only other clients make: official ones, older ones, browsers."""
    extension: bool = False
    """Whether the call is ours: no version of the official client makes it, and other servers may not serve it."""

    @property
    def is_future(self) -> bool:
        """Whether the reply is a request id, whose result is retrieved later."""
        return self.result is not None

    def url_path(self, parameters: Mapping[str, str] | None = None) -> str:
        """The path with its parameters filled in; ids keep their ``:`` and checkpoint ids their ``/``.

        >>> endpoint("get_sampler").url_path({"sampler_id": "s:sample:0"})
        '/api/v1/samplers/s:sample:0'
        """
        path = self.path
        for name, value in (parameters or {}).items():
            filled = quote(value, safe=":/" if f"{{{name}:path}}" in path else ":")
            path = path.replace(f"{{{name}:path}}", filled).replace(f"{{{name}}}", filled)
        return path


def _later(
    name: str,
    request: type[Any],
    result: type[Any],
    request_type: str,
    purpose: Purpose = "train",
    **more: Any,
) -> Endpoint:
    return Endpoint(
        name,
        "POST",
        f"/api/v1/{name}",
        purpose,
        request=request,
        response=types.UntypedAPIFuture,
        result=result,
        request_type=request_type,
        **more,
    )


_RUN = "/api/v1/training_runs/{training_run_id}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{checkpoint_id:path}}"

_TABLE = (
    # configuration and health
    Endpoint("client_config", "POST", "/api/v1/client/config", "session", types.ClientConfigRequest, types.ClientConfigResponse),
    Endpoint("client_dynamic_config", "POST", "/api/v1/client/dynamic_config", "session", types.ClientConfigRequest, types.ClientDynamicConfigResponse),
    Endpoint("healthz", "GET", "/api/v1/healthz", "rest", None, types.HealthResponse),
    Endpoint("get_server_capabilities", "GET", "/api/v1/get_server_capabilities", "rest", None, types.GetServerCapabilitiesResponse),
    Endpoint("telemetry", "POST", "/api/v1/telemetry", "telemetry", types.TelemetrySendRequest, types.TelemetryResponse),
    # identity
    Endpoint("auth_token", "POST", "/api/v1/auth/token", "rest", None, types.AuthTokenResponse),
    Endpoint("get_own_key", "GET", "/api/v1/auth/apikey/me", "rest", called_by_us=False),
    Endpoint("delete_own_key", "DELETE", "/api/v1/auth/apikey/me", "rest", called_by_us=False),
    # sessions
    Endpoint("create_session", "POST", "/api/v1/create_session", "session", types.CreateSessionRequest, types.CreateSessionResponse),
    Endpoint("session_heartbeat", "POST", "/api/v1/session_heartbeat", "session", types.SessionHeartbeatRequest, types.SessionHeartbeatResponse),
    Endpoint("finish_session", "POST", "/api/v1/sessions/{session_id}/finish", "session", types.FinishSessionRequest, None),
    Endpoint("list_sessions", "GET", "/api/v1/sessions", "rest", None, types.ListSessionsResponse),
    Endpoint("get_session", "GET", "/api/v1/sessions/{session_id}", "rest", None, types.GetSessionResponse),
    Endpoint("search_sessions", "POST", "/api/v1/sessions/search", "rest", types.SessionSearchRequest, types.SessionSearchResponse),
    Endpoint("assign_session_project", "PUT", "/api/v1/sessions/{session_id}/project", "rest", types.AssignProjectRequest, None),
    Endpoint("export_session_trace", "GET", "/api/v1/sessions/{session_id}/trace_export", "rest", None, types.TraceExportResponse),
    # training
    _later("create_model", types.CreateModelRequest, types.CreateModelResponse, "CreateModel"),
    _later("forward_backward", types.ForwardBackwardRequest, types.ForwardBackwardOutput, "ForwardBackward", request_wire="proto", result_wire="proto"),
    _later("forward", types.ForwardBackwardRequest, types.ForwardBackwardOutput, "Forward", result_wire="proto", called_by_us=False),
    _later("optim_step", types.OptimStepRequest, types.OptimStepResponse, "OptimStep"),
    _later("save_weights", types.SaveWeightsRequest, types.SaveWeightsResponse, "SaveWeights"),
    _later("save_weights_for_sampler", types.SaveWeightsForSamplerRequest, types.SaveWeightsForSamplerResponseInternal, "SaveWeightsForSampler"),
    _later("save_weights_external", types.SaveWeightsExternalRequest, types.SaveWeightsExternalResponseInternal, "SaveWeightsExternal"),
    _later("create_custom_loss", types.CreateCustomLossRequest, types.CreateCustomLossResponse, "CreateCustomLoss"),
    _later("load_weights", types.LoadWeightsRequest, types.LoadWeightsResponse, "LoadWeights"),
    _later("unload_model", types.UnloadModelRequest, types.UnloadModelResponse, "UnloadModel"),
    Endpoint("get_info", "POST", "/api/v1/get_info", "train", types.GetInfoRequest, types.GetInfoResponse),
    Endpoint("log_metrics", "POST", "/api/v1/log_metrics", "train", types.LogMetricsRequest, None, extension=True),
    Endpoint("log_rollouts", "POST", "/api/v1/log_rollouts", "train", types.LogRolloutsRequest, None, extension=True),
    Endpoint("weights_info", "POST", "/api/v1/weights_info", "rest", types.WeightsInfoRequest, types.WeightsInfoResponse),
    # sampling
    Endpoint("create_sampling_session", "POST", "/api/v1/create_sampling_session", "session", types.CreateSamplingSessionRequest, types.CreateSamplingSessionResponse),
    _later("asample", types.SampleRequest, types.SampleResponse, "Sample", "sample", result_wire="proto"),
    Endpoint("stream_sample", "POST", "/api/v1/stream_sample", "sample", types.SampleRequest, None, extension=True),
    Endpoint("get_sampler", "GET", "/api/v1/samplers/{sampler_id}", "rest", None, types.GetSamplerResponse),
    Endpoint("join_sampling_session", "POST", "/api/v1/join_sampling_session", "session", types.JoinSamplingSessionRequest, types.JoinSamplingSessionResponse),
    # results
    Endpoint("retrieve_future", "POST", "/api/v1/retrieve_future", "retrieve", types.FutureRetrieveRequest, None),
    Endpoint("cancel_future", "POST", "/api/v1/cancel_future", "retrieve", types.CancelFutureRequest, None),
    Endpoint("retrieve_futures", "POST", "/api/v1/retrieve_futures", "retrieve", types.FuturesRetrieveRequest, types.FuturesRetrieveResponse),
    # runs and checkpoints
    Endpoint("list_training_runs", "GET", "/api/v1/training_runs", "rest", None, types.TrainingRunsResponse),
    Endpoint("get_training_run", "GET", _RUN, "rest", None, types.TrainingRun),
    Endpoint("get_training_run_metrics", "GET", f"{_RUN}/metrics", "rest", None, types.TrainingRunMetrics, extension=True),
    Endpoint("list_rollouts", "GET", f"{_RUN}/rollouts", "rest", None, types.RolloutsResponse, extension=True),
    Endpoint("list_checkpoints", "GET", f"{_RUN}/checkpoints", "rest", None, types.CheckpointsListResponse),
    Endpoint("list_user_checkpoints", "GET", "/api/v1/checkpoints", "rest", None, types.CheckpointsListResponse),
    Endpoint("delete_checkpoint", "DELETE", _CHECKPOINT, "rest", None, None),
    Endpoint("publish_checkpoint", "POST", f"{_CHECKPOINT}/publish", "rest", None, None),
    Endpoint("unpublish_checkpoint", "DELETE", f"{_CHECKPOINT}/publish", "rest", None, None),
    Endpoint("set_checkpoint_ttl", "PUT", f"{_CHECKPOINT}/ttl", "rest", types.SetCheckpointTTLRequest, None),
    Endpoint("external_weights_urls", "GET", f"{_CHECKPOINT}/external_weights_urls", "rest", None, types.ExternalWeightsUrlsResponse),
    Endpoint("checkpoint_archive", "GET", f"{_CHECKPOINT}/archive", "rest", None, types.CheckpointArchiveUrlResponse),
    Endpoint("copy_weights", "POST", "/api/v1/copy_weights", "rest", types.CopyWeightsRequest, types.CopyWeightsResponse),
    Endpoint("search_checkpoints", "POST", "/api/v1/checkpoints/search", "rest", types.CheckpointSearchRequest, types.CheckpointSearchResponse),
    Endpoint("external_weights_upload_start", "POST", "/api/v1/external_weights_upload_start", "rest", types.ExternalWeightsUploadStartRequest, types.ExternalWeightsUploadStartResponse),
    Endpoint("external_weights_upload_finish", "POST", "/api/v1/external_weights_upload_finish", "rest", types.ExternalWeightsUploadFinishRequest, types.ExternalWeightsUploadFinishResponse),
    Endpoint("external_weights_upload_cancel", "POST", "/api/v1/external_weights_upload_cancel", "rest", types.ExternalWeightsUploadCancelRequest, None, extension=True),
    # images that prompts refer to
    Endpoint("upload_assets", "POST", "/api/v1/assets", "rest", None, types.AssetsResponse, request_wire="multipart", extension=True),
    Endpoint("list_assets", "GET", "/api/v1/assets", "rest", None, types.AssetsListResponse, extension=True),
    Endpoint("get_asset", "GET", "/api/v1/assets/{asset_id}", "rest", None, types.Asset, extension=True),
    Endpoint("delete_asset", "DELETE", "/api/v1/assets/{asset_id}", "rest", None, None, extension=True),
    # signed URLs, used without a key
    Endpoint("download", "GET", "/api/v1/downloads/{token}/{file}", "rest", called_by_us=False, extension=True),
    Endpoint("upload_file", "PUT", "/api/v1/uploads/{token}/{file}", "rest", request_wire="bytes", called_by_us=False, extension=True),
    # administration
    Endpoint("audit_log", "GET", "/api/v1/audit", "rest", None, types.AuditLogResponse),
    Endpoint("billing_usage", "GET", "/api/v1/billing/usage/events", "rest", None, types.BillingUsageResponse),
    Endpoint("checkpoint_storage_usage", "GET", "/api/v1/billing/usage/checkpoints/current", "rest", None, types.CurrentCheckpointStorageUsageResponse),
    # tokenizer files, for clients without access to a hub
    Endpoint("tokenizer_file", "GET", "/api/v1/tokenizers/{file}", "rest", None, None, extension=True),
)  # fmt: skip

ENDPOINTS: Mapping[str, Endpoint] = {entry.name: entry for entry in _TABLE}

SIGNED_URL = Endpoint("signed_url", "GET", "/{signed_path}", "download", extension=True)
SIGNED_UPLOAD = Endpoint(
    "signed_upload", "PUT", "/{signed_path}", "download", request_wire="bytes", extension=True
)
"""Not in the table: URLs that a server has signed, of whatever host, to fetch a file from or to send one to."""


def endpoint(name: str) -> Endpoint:
    """The entry of that name.

    >>> endpoint("optim_step").path
    '/api/v1/optim_step'
    """
    return ENDPOINTS[name]


def endpoint_at(method: str, path: str) -> Endpoint:
    """The entry of a URL path, for calls that are made by their path; one that is not in the table is a ``rest`` call.

    It names the call in events and chooses its connections, and says nothing about types.

    >>> endpoint_at("GET", "/api/v1/samplers/s:sample:0").name, endpoint_at("GET", "/api/v2/new").name
    ('get_sampler', 'GET /api/v2/new')
    """
    if method not in _METHODS:
        raise ValueError(f"the method is {', '.join(_METHODS)}, got {method!r}")
    for entry, pattern in _PATTERNS:
        if entry.method == method and pattern.fullmatch(path):
            return Endpoint(entry.name, entry.method, path, entry.purpose)
    return Endpoint(f"{method} {path}", cast("Any", method), path, "rest")


def operation_of(result: type[Any] | None) -> Endpoint:
    """The operation with this type of result, for polling; for None, any operation, whose result is a dictionary.

    >>> operation_of(types.SaveWeightsResponse).name
    'save_weights'
    """
    if result is None or result is dict:
        return Endpoint("poll", "POST", "/api/v1/retrieve_future", "retrieve", result=dict)
    if result in _NAMED_SAVES:
        return replace(endpoint(_NAMED_SAVES[result]), result=result)
    found = next((entry for entry in _TABLE if entry.result is result), None)
    if found is None:
        known = sorted(
            {entry.result.__name__.removesuffix("Internal") for entry in _TABLE if entry.result is not None}
        )
        raise ValueError(f"no operation has a result of type {result!r}; known: {', '.join(known)}")
    return found


_NAMED_SAVES: Mapping[type[Any], str] = {
    types.SaveWeightsForSamplerResponse: "save_weights_for_sampler",
    types.SaveWeightsExternalResponse: "save_weights_external",
}
"""Results of clients that have another type than the server's reply."""


_METHODS = ("GET", "POST", "PUT", "DELETE")


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{\w+(:path)?\}", path)
    return re.compile("".join(
        re.escape(part or "") if index % 2 == 0 else (".+" if part else "[^/]+") for index, part in enumerate(parts)
    ))  # fmt: skip


_PATTERNS = [(entry, _pattern(entry.path)) for entry in sorted(_TABLE, key=lambda entry: "{" in entry.path)]
