"""The calls behind the REST and the admin client: one coroutine per request of the protocol."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from base64 import urlsafe_b64decode
from collections.abc import Coroutine, Mapping
from contextlib import AbstractContextManager
from datetime import date, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urljoin

import msgspec

from tinkex import types
from tinkex._runtime import AwaitableConcurrentFuture, background
from tinkex._transport.caller import PROTOCOL_VERSION
from tinkex._transport.signed_urls import SignedUrls, redirect_target, shown_url
from tinkex._wire import json as wire_json
from tinkex._wire.endpoints import endpoint
from tinkex.clients._tokens import use_tokens
from tinkex.errors import APIResponseValidationError, APIStatusError
from tinkex.observability.tracing import OperationSpan, trace_operation

if TYPE_CHECKING:
    from tinkex._transport.base import Reply
    from tinkex._transport.caller import Caller
    from tinkex._transport.multipart import Form
    from tinkex._wire.endpoints import Endpoint

__all__ = [
    "AccessScope",
    "AuditEvents",
    "RestCalls",
    "billing_window",
    "parsed_path",
    "weights_info",
]

T = TypeVar("T")
AccessScope = Literal["owned", "accessible"]
AuditEvents = Literal["all", "checkpoints", "projects", "teams", "organizations"]

METHOD_HEADER = "x-sdk-method"
TRACE_POLL_INTERVAL_S = 5.0

logger = logging.getLogger("tinkex")


class RestCalls:
    """Makes the requests; ``method`` is the public method, which servers log."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self._checked_tokens = False

    def start(self, coroutine: Coroutine[Any, Any, T]) -> AwaitableConcurrentFuture[T]:
        """Starts a call on the background loop; callbacks that users add to its future are called in order per client."""
        return background().submit(coroutine, None, self.caller.done_callbacks)

    async def weights_info(self, tinker_path: str) -> types.WeightsInfoResponse:
        with self._trace("get_weights_info_by_tinker_path"):
            await self._ready()
            return await weights_info(self.caller, tinker_path)

    async def health(self) -> types.HealthResponse:
        return await self._get("healthz", types.HealthResponse, "get_health")

    async def capabilities(self) -> types.GetServerCapabilitiesResponse:
        method = "get_server_capabilities"
        return await self._get(method, types.GetServerCapabilitiesResponse, method)

    async def training_run(self, run_id: str, access_scope: AccessScope, method: str) -> types.TrainingRun:
        query = {"access_scope": _scope(access_scope)}
        return await self._get(
            "get_training_run", types.TrainingRun, method, {"training_run_id": run_id}, query
        )

    async def training_runs(
        self, limit: int, offset: int, access_scope: AccessScope, project_id: str | None
    ) -> types.TrainingRunsResponse:
        query = {**_page(limit, offset), "access_scope": _scope(access_scope), "project_id": project_id}
        return await self._get(
            "list_training_runs", types.TrainingRunsResponse, "list_training_runs", query=query
        )

    async def training_run_metrics(self, run_id: str, query: Mapping[str, Any]) -> types.TrainingRunMetrics:
        method, path = "get_training_run_metrics", {"training_run_id": run_id}
        return await self._get(method, types.TrainingRunMetrics, method, path, query)

    async def rollouts(self, run_id: str, query: Mapping[str, Any]) -> types.RolloutsResponse:
        method, path = "list_rollouts", {"training_run_id": run_id}
        return await self._get(method, types.RolloutsResponse, method, path, query)

    async def checkpoints(self, run_id: str) -> types.CheckpointsListResponse:
        path = {"training_run_id": run_id}
        return await self._get("list_checkpoints", types.CheckpointsListResponse, "list_checkpoints", path)

    async def user_checkpoints(self, limit: int, offset: int) -> types.CheckpointsListResponse:
        method = "list_user_checkpoints"
        return await self._get(method, types.CheckpointsListResponse, method, query=_page(limit, offset))

    async def change_checkpoint(
        self, name: str, parsed: types.ParsedCheckpointTinkerPath, method: str, value: Any = None
    ) -> None:
        """Deletes, publishes or unpublishes a checkpoint, or sets its time to live."""
        path = {"training_run_id": parsed.training_run_id, "checkpoint_id": parsed.checkpoint_id}
        # A time to live of None is sent, not left out: the checkpoint then never expires.
        body = None if value is None else wire_json.encode(value, omit_none=False)
        await self._send(endpoint(name), body, path=path, headers=_headers(method))

    async def delete_checkpoint(self, run_id: str, checkpoint_id: str) -> None:
        path = {"training_run_id": run_id, "checkpoint_id": checkpoint_id}
        method = "delete_checkpoint"
        await self._send(endpoint(method), path=path, headers=_headers(method))

    async def external_weights_urls(self, tinker_path: str) -> types.ExternalWeightsUrlsResponse:
        return await self._get(
            "external_weights_urls",
            types.ExternalWeightsUrlsResponse,
            "get_external_weights_urls",
            _checkpoint(tinker_path),
        )

    async def archive_url(
        self, run_id: str, checkpoint_id: str, method: str
    ) -> types.CheckpointArchiveUrlResponse:
        """The URL of the archive: in the body of the reply, or the target of its redirect."""
        path = {"training_run_id": run_id, "checkpoint_id": checkpoint_id}
        try:
            found = await self._send(endpoint("checkpoint_archive"), path=path, headers=_headers(method))
        except APIStatusError as error:
            location = redirect_target(error)
            if location is None:
                raise
            location = urljoin(self.caller.about(endpoint("checkpoint_archive"), path).url, location)
            expires = error.response.headers.get("expires")
            until = parsedate_to_datetime(expires) if expires else None
            return types.CheckpointArchiveUrlResponse(url=location, expires=until)
        assert isinstance(found, types.CheckpointArchiveUrlResponse)
        return found

    async def copy_weights(
        self, path: str, project_id: str, ttl_seconds: int | None, weights_access_token: str | None
    ) -> str:
        # One key for all attempts: a copy whose reply was lost is found, not made twice.
        headers = {**_headers("copy_weights"), "x-idempotency-key": str(uuid.uuid4())}
        if weights_access_token:
            headers["x-tinker-weights-access-token"] = weights_access_token
        request = types.CopyWeightsRequest(
            source_path=path, destination_project_id=project_id, ttl_seconds=ttl_seconds
        )
        copied: types.CopyWeightsResponse = await self._send(
            endpoint("copy_weights"), request, headers=headers
        )
        return copied.tinker_path

    async def search_checkpoints(
        self, request: types.CheckpointSearchRequest
    ) -> types.CheckpointSearchResponse:
        return await self._post("search_checkpoints", request, types.CheckpointSearchResponse)

    async def start_weights_upload(
        self, request: types.ExternalWeightsUploadStartRequest
    ) -> types.ExternalWeightsUploadStartResult:
        started = await self._post(
            "external_weights_upload_start", request, types.ExternalWeightsUploadStartResponse
        )
        return types.ExternalWeightsUploadStartResult(started.upload_id, started.urls, started.expires)

    async def finish_weights_upload(self, upload_id: str) -> types.ExternalWeightsUploadFinishResult:
        request = types.ExternalWeightsUploadFinishRequest(upload_id=upload_id)
        finished = await self._post(
            "external_weights_upload_finish", request, types.ExternalWeightsUploadFinishResponse
        )
        return types.ExternalWeightsUploadFinishResult(finished.tinker_path)

    async def cancel_weights_upload(self, upload_id: str) -> None:
        method = "external_weights_upload_cancel"
        request = types.ExternalWeightsUploadCancelRequest(upload_id=upload_id)
        await self._send(endpoint(method), request, headers=_headers(method))

    async def upload_asset(self, form: Form, timeout: float | None) -> types.Asset:
        return (await self._upload(form, timeout, "upload_asset"))[0]

    async def upload_assets(self, form: Form, timeout: float | None) -> list[types.Asset]:
        return await self._upload(form, timeout, "upload_assets")

    async def _upload(self, form: Form, timeout: float | None, method: str) -> list[types.Asset]:
        made: types.AssetsResponse = await self._send(
            endpoint("upload_assets"), headers=_headers(method), upload=form, timeout=timeout
        )
        return made.assets

    async def asset(self, asset_id: str) -> types.Asset:
        return await self._get("get_asset", types.Asset, "get_asset", {"asset_id": asset_id})

    async def assets(self, limit: int, offset: int) -> types.AssetsListResponse:
        method = "list_assets"
        return await self._get(method, types.AssetsListResponse, method, query=_page(limit, offset))

    async def delete_asset(self, asset_id: str) -> None:
        method = "delete_asset"
        await self._send(endpoint(method), path={"asset_id": asset_id}, headers=_headers(method))

    async def session(self, session_id: str, access_scope: AccessScope) -> types.GetSessionResponse:
        query = {"access_scope": _scope(access_scope)}
        path = {"session_id": session_id}
        return await self._get("get_session", types.GetSessionResponse, "get_session", path, query)

    async def sessions(self, limit: int, offset: int, scope: AccessScope) -> types.ListSessionsResponse:
        query = {**_page(limit, offset), "access_scope": _scope(scope)}
        return await self._get("list_sessions", types.ListSessionsResponse, "list_sessions", query=query)

    async def search(self, request: types.SessionSearchRequest) -> types.SessionSearchResponse:
        return await self._post("search_sessions", request, types.SessionSearchResponse)

    async def assign_project(self, session_id: str, project_id: str) -> None:
        method = "assign_session_project"
        request = types.AssignProjectRequest(project_id=project_id)
        await self._send(endpoint(method), request, path={"session_id": session_id}, headers=_headers(method))

    async def export_trace(self, session_id: str) -> str:
        """Polls until the trace is built."""
        with self._trace("export_session_trace"):
            return await self._exported_trace(session_id)

    async def _exported_trace(self, session_id: str) -> str:
        method = "export_session_trace"
        warned = False
        while True:
            export = await self._get(method, types.TraceExportResponse, method, {"session_id": session_id})
            if export.status == "failed":
                raise RuntimeError(f"the trace of session {session_id} could not be exported: {export.error}")
            if export.status == "ready" and export.url is not None:
                return export.url
            if not warned:
                logger.warning("the trace of session %s is being built; this may take a while", session_id)
                warned = True
            await asyncio.sleep(TRACE_POLL_INTERVAL_S)

    async def sampler(self, sampler_id: str) -> types.GetSamplerResponse:
        return await self._get(
            "get_sampler", types.GetSamplerResponse, "get_sampler", {"sampler_id": sampler_id}
        )

    async def whoami(self) -> types.WhoamiResponse:
        """The owner that the token names; a plain key is exchanged for a token if the server issues them."""
        key = self.caller.config.api_key or ""
        if self.caller.tokens is None and key.startswith("eyJ"):
            return _identity(key)
        with self._trace("whoami"):
            await self._ready(always=True)
            if self.caller.tokens is None:
                raise RuntimeError(
                    "this server issues no identity tokens, and a plain API key does not name its owner; "
                    "ask the operator of the server"
                )
            return _identity(await self.caller.tokens.current())

    async def audit_log(self, event_type: AuditEvents, day: date | None) -> types.AuditLogResponse:
        """The log: in the body of the reply, or behind the signed URL that it redirects to."""
        query = {"event_type": event_type, "day": day.isoformat() if day is not None else None}
        try:
            return await self._get("audit_log", types.AuditLogResponse, "get_audit_log", query=query)
        except APIStatusError as error:
            location = redirect_target(error)
            if location is None:
                raise
            location = urljoin(self.caller.about(endpoint("audit_log")).url, location)
            return await self._read_signed(location, types.AuditLogResponse)

    async def billing_usage(self, window: types.GetBillingUsageRequest) -> types.BillingUsageResponse:
        query = window.model_dump(mode="json")
        return await self._get("billing_usage", types.BillingUsageResponse, "get_billing_usage", query=query)

    async def storage_usage(self, project_id: str | None) -> types.CurrentCheckpointStorageUsageResponse:
        return await self._get(
            "checkpoint_storage_usage",
            types.CurrentCheckpointStorageUsageResponse,
            "get_current_checkpoint_storage_usage",
            query={"project_id": project_id},
        )

    async def _read_signed(self, url: str, kind: type[T]) -> T:
        """The value behind a signed URL, which is fetched without the API key."""
        urls = SignedUrls(self.caller.config, sink=self.caller.sink)
        try:
            return wire_json.decode(await urls.read(url), kind)
        except wire_json.Malformed as error:
            raise APIResponseValidationError(
                None, None, f"{shown_url(url)} does not follow the protocol: {error}"
            ) from error
        finally:
            await urls.close()

    async def _get(
        self,
        name: str,
        kind: type[T],
        method: str,
        path: Mapping[str, str] | None = None,
        query: Mapping[str, Any] | None = None,
    ) -> T:
        value = await self._send(endpoint(name), path=path, query=query, headers=_headers(method))
        assert isinstance(value, kind)
        return value

    async def _post(self, name: str, value: Any, kind: type[T]) -> T:
        """Makes a call whose endpoint has the name of the public method."""
        reply = await self._send(endpoint(name), value, headers=_headers(name))
        assert isinstance(reply, kind)
        return reply

    async def _send(
        self, endpoint: Endpoint, value: Any = None, *, headers: Mapping[str, str], **more: Any
    ) -> Any:
        with self._trace(headers[METHOD_HEADER]):
            await self._ready()
            return await self.caller.call(endpoint, value, headers=headers, **more)

    async def exchange(self, endpoint: Endpoint, value: Any, **more: Any) -> Reply:
        """Makes a call by its path and returns the raw reply."""
        with self._trace(endpoint.name):
            await self._ready()
            return await self.caller.exchange(endpoint, value, **more)

    def _trace(self, name: str) -> AbstractContextManager[OperationSpan | None]:
        return trace_operation(name, on=self.caller.config.tracing)

    async def _ready(self, *, always: bool = False) -> None:
        """Requests once whether the server uses tokens; servers of your own accept the key and get no such request."""
        config = self.caller.config
        needed = (
            always or config.credential_cmd is not None or (config.is_hosted and config.api_key is not None)
        )
        if self._checked_tokens or self.caller.tokens is not None or not needed:
            return
        request = types.ClientConfigRequest(sdk_version=PROTOCOL_VERSION)
        use_tokens(self.caller, await self.caller.call(endpoint("client_config"), request))
        self._checked_tokens = True


async def weights_info(caller: Caller, tinker_path: str) -> types.WeightsInfoResponse:
    """What a checkpoint contains, by its path."""
    parsed_path(tinker_path)
    info: types.WeightsInfoResponse = await caller.call(
        endpoint("weights_info"),
        types.WeightsInfoRequest(tinker_path=tinker_path),
        headers=_headers("get_weights_info_by_tinker_path"),
    )
    return info


def parsed_path(tinker_path: str) -> types.ParsedCheckpointTinkerPath:
    """The parts of a checkpoint path; raises a ``ValueError`` that shows the right form."""
    return types.ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)


def _headers(method: str) -> dict[str, str]:
    """The headers that name the public method, which servers log."""
    return {"x-sdk-version": PROTOCOL_VERSION, METHOD_HEADER: method}


def _checkpoint(tinker_path: str) -> dict[str, str]:
    parsed = parsed_path(tinker_path)
    return {"training_run_id": parsed.training_run_id, "checkpoint_id": parsed.checkpoint_id}


def _scope(access_scope: str) -> str:
    if access_scope not in {"owned", "accessible"}:
        raise ValueError(f"access_scope is 'owned' or 'accessible', got {access_scope!r}")
    return access_scope


def _page(limit: int, offset: int) -> dict[str, Any]:
    if limit < 0 or offset < 0:
        raise ValueError(f"limit and offset are at least 0, got {limit} and {offset}")
    return {"limit": limit, "offset": offset}


def _identity(jwt: str) -> types.WhoamiResponse:
    try:
        payload = jwt.split(".")[1]
        claims = json.loads(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return types.WhoamiResponse(
            user_urn=str(claims["sub"]),
            org_urn=f"tml:organization:{claims['org_id']}",
            email=claims.get("email") or None,
        )
    except (IndexError, KeyError, ValueError, AttributeError) as error:
        raise RuntimeError("the identity token cannot be read; log in again") from error


def billing_window(
    starting_on: datetime | str, ending_before: datetime | str
) -> types.GetBillingUsageRequest:
    """The window of a billing request, from datetimes or RFC 3339 strings."""
    try:
        window: types.GetBillingUsageRequest = msgspec.convert(
            {"starting_on": starting_on, "ending_before": ending_before}, types.GetBillingUsageRequest
        )
    except msgspec.ValidationError as error:
        raise ValueError(
            f"the window is two datetimes, or strings such as 2026-07-13T00:00:00Z: {error}"
        ) from error
    return window
