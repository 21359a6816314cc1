"""The REST client: runs, checkpoints, sessions, samplers and images, without a session of its own."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex import types
from tinkex._runtime import await_future, background
from tinkex.clients._assets import AssetMethods
from tinkex.clients._rest_calls import AccessScope, AuditEvents, parsed_path, weights_info
from tinkex.clients._sessionless import Sessionless
from tinkex.errors import ExperimentalWarning
from tinkex.futures import APIFuture, AwaitableConcurrentFuture

if TYPE_CHECKING:
    from tinkex.clients.admin import AdminClient

__all__ = ["AccessScope", "RestClient", "weights_info"]

T = TypeVar("T")


class RestClient(AssetMethods, Sessionless):
    """Reads and manages what lies on a server.

    ::

        rest = tinkex.RestClient(base_url="local")
        for run in rest.iter_training_runs():
            print(run.training_run_id, run.base_model)

    Methods return futures; each has an ``_async`` twin that returns the value. ``list_…`` is one page,
    ``iter_…`` every item, page after page.
    """

    # ---- runs ----

    def get_training_run(
        self, training_run_id: types.ModelID, access_scope: AccessScope = "owned"
    ) -> Future[types.TrainingRun]:
        """One training run."""
        return background().submit(
            self._calls.training_run(training_run_id, access_scope, "get_training_run")
        )

    async def get_training_run_async(
        self, training_run_id: types.ModelID, access_scope: AccessScope = "owned"
    ) -> types.TrainingRun:
        """As :meth:`get_training_run`."""
        return await _value(self._calls.training_run(training_run_id, access_scope, "get_training_run"))

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> Future[types.TrainingRun]:
        """The run a checkpoint belongs to."""
        run_id = parsed_path(tinker_path).training_run_id
        return background().submit(
            self._calls.training_run(run_id, access_scope, "get_training_run_by_tinker_path")
        )

    async def get_training_run_by_tinker_path_async(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> types.TrainingRun:
        """As :meth:`get_training_run_by_tinker_path`."""
        run_id = parsed_path(tinker_path).training_run_id
        return await _value(self._calls.training_run(run_id, access_scope, "get_training_run_by_tinker_path"))

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> Future[types.TrainingRunsResponse]:
        """A page of training runs, newest first."""
        return background().submit(self._calls.training_runs(limit, offset, access_scope, project_id))

    async def list_training_runs_async(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> types.TrainingRunsResponse:
        """As :meth:`list_training_runs`."""
        return await _value(self._calls.training_runs(limit, offset, access_scope, project_id))

    def iter_training_runs(
        self, page_size: int = 100, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> Iterator[types.TrainingRun]:
        """Every training run, newest first; pages are fetched as they are needed."""
        offset = 0
        while (
            page := self.list_training_runs(page_size, offset, access_scope, project_id)
            .result()
            .training_runs
        ):
            yield from page
            offset += len(page)

    async def iter_training_runs_async(
        self, page_size: int = 100, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> AsyncIterator[types.TrainingRun]:
        """As :meth:`iter_training_runs`, with ``async for``."""
        offset = 0
        while True:
            page = await self.list_training_runs_async(page_size, offset, access_scope, project_id)
            if not page.training_runs:
                return
            for run in page.training_runs:
                yield run
            offset += len(page.training_runs)

    # ---- checkpoints ----

    def list_checkpoints(self, training_run_id: types.ModelID) -> Future[types.CheckpointsListResponse]:
        """Every checkpoint of a run."""
        return background().submit(self._calls.checkpoints(training_run_id))

    async def list_checkpoints_async(self, training_run_id: types.ModelID) -> types.CheckpointsListResponse:
        """As :meth:`list_checkpoints`."""
        return await _value(self._calls.checkpoints(training_run_id))

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0
    ) -> Future[types.CheckpointsListResponse]:
        """A page of the checkpoints of all runs of this key."""
        return background().submit(self._calls.user_checkpoints(limit, offset))

    async def list_user_checkpoints_async(
        self, limit: int = 100, offset: int = 0
    ) -> types.CheckpointsListResponse:
        """As :meth:`list_user_checkpoints`."""
        return await _value(self._calls.user_checkpoints(limit, offset))

    def iter_checkpoints(self, training_run_id: types.ModelID) -> Iterator[types.Checkpoint]:
        """Every checkpoint of a run."""
        yield from self.list_checkpoints(training_run_id).result().checkpoints

    async def iter_checkpoints_async(self, training_run_id: types.ModelID) -> AsyncIterator[types.Checkpoint]:
        """As :meth:`iter_checkpoints`, with ``async for``."""
        for checkpoint in (await self.list_checkpoints_async(training_run_id)).checkpoints:
            yield checkpoint

    def iter_user_checkpoints(self, page_size: int = 100) -> Iterator[types.Checkpoint]:
        """Every checkpoint of all runs of this key; pages are fetched as they are needed."""
        offset = 0
        while page := self.list_user_checkpoints(page_size, offset).result().checkpoints:
            yield from page
            offset += len(page)

    async def iter_user_checkpoints_async(self, page_size: int = 100) -> AsyncIterator[types.Checkpoint]:
        """As :meth:`iter_user_checkpoints`, with ``async for``."""
        offset = 0
        while page := (await self.list_user_checkpoints_async(page_size, offset)).checkpoints:
            for checkpoint in page:
                yield checkpoint
            offset += len(page)

    def delete_checkpoint(self, training_run_id: types.ModelID, checkpoint_id: str) -> Future[None]:
        """Deletes a checkpoint; ``checkpoint_id`` is as listed, such as ``weights/0001``."""
        return background().submit(self._calls.delete_checkpoint(training_run_id, checkpoint_id))

    async def delete_checkpoint_async(self, training_run_id: types.ModelID, checkpoint_id: str) -> None:
        """As :meth:`delete_checkpoint`."""
        await _value(self._calls.delete_checkpoint(training_run_id, checkpoint_id))

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> Future[None]:
        """Deletes the checkpoint at a path."""
        parsed = parsed_path(tinker_path)
        return background().submit(
            self._calls.change_checkpoint("delete_checkpoint", parsed, "delete_checkpoint_from_tinker_path")
        )

    async def delete_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """As :meth:`delete_checkpoint_from_tinker_path`."""
        parsed = parsed_path(tinker_path)
        await _value(
            self._calls.change_checkpoint("delete_checkpoint", parsed, "delete_checkpoint_from_tinker_path")
        )

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> Future[None]:
        """Lets everybody on the server read a checkpoint."""
        parsed = parsed_path(tinker_path)
        return background().submit(
            self._calls.change_checkpoint("publish_checkpoint", parsed, "publish_checkpoint_from_tinker_path")
        )

    async def publish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """As :meth:`publish_checkpoint_from_tinker_path`."""
        parsed = parsed_path(tinker_path)
        await _value(
            self._calls.change_checkpoint("publish_checkpoint", parsed, "publish_checkpoint_from_tinker_path")
        )

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> Future[None]:
        """Keeps a checkpoint to its owner again."""
        parsed = parsed_path(tinker_path)
        return background().submit(
            self._calls.change_checkpoint(
                "unpublish_checkpoint", parsed, "unpublish_checkpoint_from_tinker_path"
            )
        )

    async def unpublish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """As :meth:`unpublish_checkpoint_from_tinker_path`."""
        parsed = parsed_path(tinker_path)
        await _value(
            self._calls.change_checkpoint(
                "unpublish_checkpoint", parsed, "unpublish_checkpoint_from_tinker_path"
            )
        )

    def set_checkpoint_ttl_from_tinker_path(self, tinker_path: str, ttl_seconds: int | None) -> Future[None]:
        """Keeps a checkpoint for so many seconds from now, or with ``None`` until it is deleted."""
        parsed = parsed_path(tinker_path)
        ttl = types.SetCheckpointTTLRequest(ttl_seconds=ttl_seconds)
        return background().submit(
            self._calls.change_checkpoint(
                "set_checkpoint_ttl", parsed, "set_checkpoint_ttl_from_tinker_path", ttl
            )
        )

    async def set_checkpoint_ttl_from_tinker_path_async(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> None:
        """As :meth:`set_checkpoint_ttl_from_tinker_path`."""
        parsed = parsed_path(tinker_path)
        ttl = types.SetCheckpointTTLRequest(ttl_seconds=ttl_seconds)
        await _value(
            self._calls.change_checkpoint(
                "set_checkpoint_ttl", parsed, "set_checkpoint_ttl_from_tinker_path", ttl
            )
        )

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[types.WeightsInfoResponse]:
        """What a checkpoint holds: base model, rank, which layers are trained."""
        return AwaitableConcurrentFuture(background().submit(self._calls.weights_info(tinker_path)))

    async def get_weights_info_by_tinker_path_async(self, tinker_path: str) -> types.WeightsInfoResponse:
        """As :meth:`get_weights_info_by_tinker_path`."""
        return await _value(self._calls.weights_info(tinker_path))

    def get_external_weights_urls(self, tinker_path: str) -> Future[types.ExternalWeightsUrlsResponse]:
        """An address per file of a checkpoint made with ``save_weights_external``."""
        _check_external(tinker_path)
        return background().submit(self._calls.external_weights_urls(tinker_path))

    async def get_external_weights_urls_async(self, tinker_path: str) -> types.ExternalWeightsUrlsResponse:
        """As :meth:`get_external_weights_urls`."""
        _check_external(tinker_path)
        return await _value(self._calls.external_weights_urls(tinker_path))

    def get_checkpoint_archive_url_from_tinker_path(
        self, tinker_path: str
    ) -> Future[types.CheckpointArchiveUrlResponse]:
        """Where a checkpoint can be fetched as one file: ``.result().url``."""
        parsed_path(tinker_path)
        return background().submit(self._calls.archive_url(tinker_path))

    async def get_checkpoint_archive_url_from_tinker_path_async(
        self, tinker_path: str
    ) -> types.CheckpointArchiveUrlResponse:
        """As :meth:`get_checkpoint_archive_url_from_tinker_path`."""
        parsed_path(tinker_path)
        return await _value(self._calls.archive_url(tinker_path))

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> AwaitableConcurrentFuture[str]:
        """Copies a checkpoint into a project (default: ``TINKER_PROJECT_ID``); the result is its new path."""
        project = self._project(destination_project_id)
        copying = self._calls.copy_weights(path, project, ttl_seconds, weights_access_token)
        return AwaitableConcurrentFuture(background().submit(copying))

    async def copy_weights_async(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> str:
        """As :meth:`copy_weights`."""
        project = self._project(destination_project_id)
        return await _value(self._calls.copy_weights(path, project, ttl_seconds, weights_access_token))

    # ---- sessions and samplers ----

    def get_session(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> Future[types.GetSessionResponse]:
        """The runs and samplers a session made."""
        return background().submit(self._calls.session(session_id, access_scope))

    async def get_session_async(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> types.GetSessionResponse:
        """As :meth:`get_session`."""
        return await _value(self._calls.session(session_id, access_scope))

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> Future[types.ListSessionsResponse]:
        """A page of session ids, newest first."""
        return background().submit(self._calls.sessions(limit, offset, access_scope))

    async def list_sessions_async(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> types.ListSessionsResponse:
        """As :meth:`list_sessions`."""
        return await _value(self._calls.sessions(limit, offset, access_scope))

    def iter_sessions(self, page_size: int = 100, access_scope: AccessScope = "owned") -> Iterator[str]:
        """Every session id, newest first; pages are fetched as they are needed."""
        offset = 0
        while page := self.list_sessions(page_size, offset, access_scope).result().sessions:
            yield from page
            offset += len(page)

    async def iter_sessions_async(
        self, page_size: int = 100, access_scope: AccessScope = "owned"
    ) -> AsyncIterator[str]:
        """As :meth:`iter_sessions`, with ``async for``."""
        offset = 0
        while page := (await self.list_sessions_async(page_size, offset, access_scope)).sessions:
            for session_id in page:
                yield session_id
            offset += len(page)

    def search_sessions(self, request: types.SessionSearchRequest) -> Future[types.SessionSearchResponse]:
        """A page of the sessions that fit, newest first. Experimental: it may change."""
        _warn_experimental()
        return background().submit(self._calls.search(request))

    async def search_sessions_async(self, request: types.SessionSearchRequest) -> types.SessionSearchResponse:
        """As :meth:`search_sessions`."""
        _warn_experimental()
        return await _value(self._calls.search(request))

    def iter_search_sessions(self, request: types.SessionSearchRequest) -> Iterator[types.SessionSummary]:
        """Every session that fits; ``request.limit`` is the size of a page. Experimental: it may change."""
        while True:
            page = self.search_sessions(request).result()
            yield from page.sessions
            if page.next_cursor is None:
                return
            request = request.model_copy(update={"cursor": page.next_cursor})

    async def iter_search_sessions_async(
        self, request: types.SessionSearchRequest
    ) -> AsyncIterator[types.SessionSummary]:
        """As :meth:`iter_search_sessions`, with ``async for``."""
        while True:
            page = await self.search_sessions_async(request)
            for session in page.sessions:
                yield session
            if page.next_cursor is None:
                return
            request = request.model_copy(update={"cursor": page.next_cursor})

    def assign_session_project(self, session_id: str, project_id: str) -> Future[None]:
        """Moves a session, with all it made, into a project."""
        return background().submit(self._calls.assign_project(session_id, project_id))

    async def assign_session_project_async(self, session_id: str, project_id: str) -> None:
        """As :meth:`assign_session_project`."""
        await _value(self._calls.assign_project(session_id, project_id))

    def export_session_trace(self, session_id: str) -> Future[str]:
        """Where the timeline of a session can be fetched as a Perfetto trace, once it is built."""
        return background().submit(self._calls.export_trace(session_id))

    async def export_session_trace_async(self, session_id: str) -> str:
        """As :meth:`export_session_trace`."""
        return await _value(self._calls.export_trace(session_id))

    def get_sampler(self, sampler_id: str) -> APIFuture[types.GetSamplerResponse]:
        """What a sampler samples from."""
        return AwaitableConcurrentFuture(background().submit(self._calls.sampler(sampler_id)))

    async def get_sampler_async(self, sampler_id: str) -> types.GetSamplerResponse:
        """As :meth:`get_sampler`."""
        return await _value(self._calls.sampler(sampler_id))

    def whoami(self) -> APIFuture[types.WhoamiResponse]:
        """Who this key belongs to, where the server hands out identity tokens."""
        return AwaitableConcurrentFuture(background().submit(self._calls.whoami()))

    async def whoami_async(self) -> types.WhoamiResponse:
        """As :meth:`whoami`."""
        return await _value(self._calls.whoami())

    def get_health(self) -> Future[types.HealthResponse]:
        """Whether the server is well; needs no key."""
        return background().submit(self._calls.health())

    async def get_health_async(self) -> types.HealthResponse:
        """As :meth:`get_health`."""
        return await _value(self._calls.health())

    def get_telemetry(self) -> None:
        """None: this client reports nothing about itself."""

    # ---- moved to the admin client ----

    def get_audit_log(
        self, event_type: AuditEvents = "all", day: date | None = None
    ) -> Future[types.AuditLogResponse]:
        """Deprecated: use :meth:`AdminClient.get_audit_log`."""
        return self._admin("get_audit_log").get_audit_log(event_type, day)

    async def get_audit_log_async(
        self, event_type: AuditEvents = "all", day: date | None = None
    ) -> types.AuditLogResponse:
        """Deprecated: use :meth:`AdminClient.get_audit_log_async`."""
        return await self._admin("get_audit_log_async").get_audit_log_async(event_type, day)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> Future[types.BillingUsageResponse]:
        """Deprecated: use :meth:`AdminClient.get_billing_usage`."""
        return self._admin("get_billing_usage").get_billing_usage(starting_on, ending_before)

    async def get_billing_usage_async(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> types.BillingUsageResponse:
        """Deprecated: use :meth:`AdminClient.get_billing_usage_async`."""
        return await self._admin("get_billing_usage_async").get_billing_usage_async(
            starting_on, ending_before
        )

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> Future[types.CurrentCheckpointStorageUsageResponse]:
        """Deprecated: use :meth:`AdminClient.get_current_checkpoint_storage_usage`."""
        return self._admin("get_current_checkpoint_storage_usage").get_current_checkpoint_storage_usage(
            project_id
        )

    async def get_current_checkpoint_storage_usage_async(
        self, project_id: str | None = None
    ) -> types.CurrentCheckpointStorageUsageResponse:
        """Deprecated: use :meth:`AdminClient.get_current_checkpoint_storage_usage_async`."""
        return await self._admin(
            "get_current_checkpoint_storage_usage_async"
        ).get_current_checkpoint_storage_usage_async(project_id)

    def _admin(self, method: str) -> AdminClient:
        from tinkex.clients.admin import AdminClient

        warnings.warn(
            f"RestClient.{method} is deprecated; use AdminClient().{method}, which takes the same arguments",
            FutureWarning,
            stacklevel=3,
        )
        return AdminClient(caller=self._caller)

    def _project(self, destination: str | None) -> str:
        project = destination or self._caller.config.project_id
        if not project:
            raise ValueError(
                "copy_weights needs a project: pass destination_project_id or set TINKER_PROJECT_ID"
            )
        return project


async def _value(call: Coroutine[Any, Any, T]) -> T:
    return await await_future(background().submit(call), propagate_cancel=True)


def _check_external(tinker_path: str) -> None:
    if parsed_path(tinker_path).checkpoint_type != "external":
        raise ValueError(
            f"{tinker_path} is no exported checkpoint; make one with save_weights_external, "
            "its path is tinker://<run>/external_weights/<name>"
        )


def _warn_experimental() -> None:
    warnings.warn(
        "RestClient.search_sessions is experimental: it may change or go away",
        ExperimentalWarning,
        stacklevel=3,
    )
