"""The REST client: runs, checkpoints, sessions and samplers, without a session of its own."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tinkex import types
from tinkex._runtime import arrival, background
from tinkex._transport.caller import PROTOCOL_VERSION
from tinkex._wire.endpoints import endpoint
from tinkex.clients._connection import connect
from tinkex.futures import APIFuture, AwaitableConcurrentFuture

if TYPE_CHECKING:
    from tinkex._transport.base import Transport
    from tinkex._transport.caller import Caller
    from tinkex.config import Config
    from tinkex.events import Sink

__all__ = ["AccessScope", "RestClient"]

T = TypeVar("T")
AccessScope = Literal["owned", "accessible"]


class RestClient:
    """Reads and manages what lies on a server.

    ::

        rest = tinkex.RestClient(base_url="local")
        for run in rest.list_training_runs(limit=5).result().training_runs:
            print(run.training_run_id, run.base_model)

    Methods return futures; each has an ``_async`` twin that returns the value.
    """

    def __init__(
        self,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        config: Config | None = None,
        transport: Transport | None = None,
        events: Sink | None = None,
        caller: Caller | None = None,
    ) -> None:
        self._caller = caller or connect(
            config=config, transport=transport, events=events, base_url=base_url, api_key=api_key
        )

    # ---- runs ----

    def get_training_run(
        self, training_run_id: types.ModelID, access_scope: AccessScope = "owned"
    ) -> Future[types.TrainingRun]:
        """One training run."""
        return background().submit(self._training_run(training_run_id, access_scope))

    async def get_training_run_async(
        self, training_run_id: types.ModelID, access_scope: AccessScope = "owned"
    ) -> types.TrainingRun:
        """As :meth:`get_training_run`."""
        return await _value(self._training_run(training_run_id, access_scope))

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> Future[types.TrainingRun]:
        """The run a checkpoint belongs to."""
        return self.get_training_run(_parsed(tinker_path).training_run_id, access_scope)

    async def get_training_run_by_tinker_path_async(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> types.TrainingRun:
        """As :meth:`get_training_run_by_tinker_path`."""
        return await self.get_training_run_async(_parsed(tinker_path).training_run_id, access_scope)

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> Future[types.TrainingRunsResponse]:
        """A page of training runs, newest first."""
        return background().submit(self._training_runs(limit, offset, access_scope, project_id))

    async def list_training_runs_async(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> types.TrainingRunsResponse:
        """As :meth:`list_training_runs`."""
        return await _value(self._training_runs(limit, offset, access_scope, project_id))

    # ---- checkpoints ----

    def list_checkpoints(self, training_run_id: types.ModelID) -> Future[types.CheckpointsListResponse]:
        """Every checkpoint of a run."""
        return background().submit(self._checkpoints(training_run_id))

    async def list_checkpoints_async(self, training_run_id: types.ModelID) -> types.CheckpointsListResponse:
        """As :meth:`list_checkpoints`."""
        return await _value(self._checkpoints(training_run_id))

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0
    ) -> Future[types.CheckpointsListResponse]:
        """A page of the checkpoints of all runs of this key."""
        return background().submit(self._user_checkpoints(limit, offset))

    async def list_user_checkpoints_async(
        self, limit: int = 100, offset: int = 0
    ) -> types.CheckpointsListResponse:
        """As :meth:`list_user_checkpoints`."""
        return await _value(self._user_checkpoints(limit, offset))

    def delete_checkpoint(self, training_run_id: types.ModelID, checkpoint_id: str) -> Future[None]:
        """Deletes a checkpoint; ``checkpoint_id`` is as listed, such as ``weights/0001``."""
        return background().submit(self._delete(training_run_id, checkpoint_id))

    async def delete_checkpoint_async(self, training_run_id: types.ModelID, checkpoint_id: str) -> None:
        """As :meth:`delete_checkpoint`."""
        await _value(self._delete(training_run_id, checkpoint_id))

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> Future[None]:
        """Deletes the checkpoint at a path."""
        parsed = _parsed(tinker_path)
        return self.delete_checkpoint(parsed.training_run_id, parsed.checkpoint_id)

    async def delete_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """As :meth:`delete_checkpoint_from_tinker_path`."""
        parsed = _parsed(tinker_path)
        await self.delete_checkpoint_async(parsed.training_run_id, parsed.checkpoint_id)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[types.WeightsInfoResponse]:
        """What a checkpoint holds: base model, rank, which layers are trained."""
        return AwaitableConcurrentFuture(background().submit(weights_info(self._caller, tinker_path)))

    async def get_weights_info_by_tinker_path_async(self, tinker_path: str) -> types.WeightsInfoResponse:
        """As :meth:`get_weights_info_by_tinker_path`."""
        return await _value(weights_info(self._caller, tinker_path))

    # ---- sessions and samplers ----

    def get_session(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> Future[types.GetSessionResponse]:
        """The runs and samplers a session made."""
        return background().submit(self._session(session_id, access_scope))

    async def get_session_async(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> types.GetSessionResponse:
        """As :meth:`get_session`."""
        return await _value(self._session(session_id, access_scope))

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> Future[types.ListSessionsResponse]:
        """A page of session ids, newest first."""
        return background().submit(self._sessions(limit, offset, access_scope))

    async def list_sessions_async(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> types.ListSessionsResponse:
        """As :meth:`list_sessions`."""
        return await _value(self._sessions(limit, offset, access_scope))

    def get_sampler(self, sampler_id: str) -> APIFuture[types.GetSamplerResponse]:
        """What a sampler samples from."""
        return AwaitableConcurrentFuture(background().submit(self._sampler(sampler_id)))

    async def get_sampler_async(self, sampler_id: str) -> types.GetSamplerResponse:
        """As :meth:`get_sampler`."""
        return await _value(self._sampler(sampler_id))

    def get_health(self) -> Future[types.HealthResponse]:
        """Whether the server is well; needs no key."""
        return background().submit(self._health())

    async def get_health_async(self) -> types.HealthResponse:
        """As :meth:`get_health`."""
        return await _value(self._health())

    # ---- the calls ----

    async def _health(self) -> types.HealthResponse:
        return await self._call("healthz", types.HealthResponse)

    async def _training_run(self, run_id: str, access_scope: AccessScope) -> types.TrainingRun:
        query = {"access_scope": _scope(access_scope)}
        return await self._call("get_training_run", types.TrainingRun, {"training_run_id": run_id}, query)

    async def _training_runs(
        self, limit: int, offset: int, access_scope: AccessScope, project_id: str | None
    ) -> types.TrainingRunsResponse:
        query = {**_page(limit, offset), "access_scope": _scope(access_scope), "project_id": project_id}
        return await self._call("list_training_runs", types.TrainingRunsResponse, query=query)

    async def _checkpoints(self, run_id: str) -> types.CheckpointsListResponse:
        return await self._call(
            "list_checkpoints", types.CheckpointsListResponse, {"training_run_id": run_id}
        )

    async def _user_checkpoints(self, limit: int, offset: int) -> types.CheckpointsListResponse:
        return await self._call(
            "list_user_checkpoints", types.CheckpointsListResponse, query=_page(limit, offset)
        )

    async def _session(self, session_id: str, access_scope: AccessScope) -> types.GetSessionResponse:
        query = {"access_scope": _scope(access_scope)}
        return await self._call("get_session", types.GetSessionResponse, {"session_id": session_id}, query)

    async def _sessions(self, limit: int, offset: int, scope: AccessScope) -> types.ListSessionsResponse:
        query = {**_page(limit, offset), "access_scope": _scope(scope)}
        return await self._call("list_sessions", types.ListSessionsResponse, query=query)

    async def _sampler(self, sampler_id: str) -> types.GetSamplerResponse:
        return await self._call("get_sampler", types.GetSamplerResponse, {"sampler_id": sampler_id})

    async def _delete(self, run_id: str, checkpoint_id: str) -> None:
        path = {"training_run_id": run_id, "checkpoint_id": checkpoint_id}
        await self._caller.call(endpoint("delete_checkpoint"), path=path, headers=_said("delete_checkpoint"))

    async def _call(
        self,
        row: str,
        kind: type[T],
        path: Mapping[str, str] | None = None,
        query: Mapping[str, Any] | None = None,
    ) -> T:
        value = await self._caller.call(endpoint(row), path=path, query=query, headers=_said(row))
        assert isinstance(value, kind)
        return value


async def weights_info(caller: Caller, tinker_path: str) -> types.WeightsInfoResponse:
    """What a checkpoint holds, by its path."""
    _parsed(tinker_path)
    info: types.WeightsInfoResponse = await caller.call(
        endpoint("weights_info"), types.WeightsInfoRequest(tinker_path=tinker_path)
    )
    return info


async def _value(call: Coroutine[Any, Any, T]) -> T:
    return await arrival(background().submit(call), cancel_with_me=True)


def _said(method: str) -> dict[str, str]:
    """Which method of the SDK makes the call, as servers log it."""
    return {"x-sdk-version": PROTOCOL_VERSION, "x-sdk-method": method}


def _parsed(tinker_path: str) -> types.ParsedCheckpointTinkerPath:
    return types.ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)


def _scope(access_scope: str) -> str:
    if access_scope not in {"owned", "accessible"}:
        raise ValueError(f"access_scope is 'owned' or 'accessible', got {access_scope!r}")
    return access_scope


def _page(limit: int, offset: int) -> dict[str, Any]:
    if limit < 0 or offset < 0:
        raise ValueError(f"limit and offset are at least 0, got {limit} and {offset}")
    return {"limit": limit, "offset": offset}
