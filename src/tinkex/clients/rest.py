"""The REST client: runs, checkpoints, sessions, samplers and images, without a session of its own."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import date, datetime
from typing import TYPE_CHECKING

from tinkex import types
from tinkex._runtime import background
from tinkex.clients._assets import AssetMethods
from tinkex.clients._paging import PageIterator, by_offset
from tinkex.clients._rest_calls import AccessScope, AuditEvents, parsed_path, weights_info
from tinkex.clients._sessionless import SessionlessClient
from tinkex.clients._twins import async_iterator, async_result
from tinkex.clients._warnings import warn_caller
from tinkex.errors import ExperimentalWarning
from tinkex.futures import APIFuture, AwaitableConcurrentFuture

if TYPE_CHECKING:
    from tinkex.clients.admin import AdminClient

__all__ = ["AccessScope", "RestClient", "weights_info"]


class RestClient(AssetMethods, SessionlessClient):
    """Reads and manages what a server stores.

    ::

        rest = tinkex.RestClient(base_url="local")
        for run in rest.iter_training_runs():
            print(run.training_run_id, run.base_model)

    Methods return futures; each has an ``_async`` form that returns the value. ``list_…`` returns one page,
    ``iter_…`` every item of all pages.
    """

    # ---- runs ----

    def get_training_run(
        self, training_run_id: types.ModelID, access_scope: AccessScope = "owned"
    ) -> Future[types.TrainingRun]:
        """One training run."""
        return background().submit(
            self._calls.training_run(training_run_id, access_scope, "get_training_run")
        )

    get_training_run_async = async_result(get_training_run)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> Future[types.TrainingRun]:
        """The run that a checkpoint belongs to."""
        run_id = parsed_path(tinker_path).training_run_id
        return background().submit(
            self._calls.training_run(run_id, access_scope, "get_training_run_by_tinker_path")
        )

    get_training_run_by_tinker_path_async = async_result(get_training_run_by_tinker_path)

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> Future[types.TrainingRunsResponse]:
        """A page of training runs, newest first."""
        return background().submit(self._calls.training_runs(limit, offset, access_scope, project_id))

    list_training_runs_async = async_result(list_training_runs)

    def iter_training_runs(
        self, page_size: int = 100, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> PageIterator[types.TrainingRunsResponse, types.TrainingRun]:
        """Every training run, newest first; pages are requested as they are needed."""
        return by_offset(
            lambda offset: self.list_training_runs(page_size, offset, access_scope, project_id),
            lambda page: page.training_runs,
        )

    iter_training_runs_async = async_iterator(iter_training_runs)

    # ---- checkpoints ----

    def list_checkpoints(self, training_run_id: types.ModelID) -> Future[types.CheckpointsListResponse]:
        """Every checkpoint of a run."""
        return background().submit(self._calls.checkpoints(training_run_id))

    list_checkpoints_async = async_result(list_checkpoints)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0
    ) -> Future[types.CheckpointsListResponse]:
        """A page of the checkpoints of all runs of this key."""
        return background().submit(self._calls.user_checkpoints(limit, offset))

    list_user_checkpoints_async = async_result(list_user_checkpoints)

    def iter_checkpoints(
        self, training_run_id: types.ModelID
    ) -> PageIterator[types.CheckpointsListResponse, types.Checkpoint]:
        """Every checkpoint of a run."""
        return PageIterator(
            lambda previous: None if previous is not None else self.list_checkpoints(training_run_id),
            lambda page: page.checkpoints,
        )

    iter_checkpoints_async = async_iterator(iter_checkpoints)

    def iter_user_checkpoints(
        self, page_size: int = 100
    ) -> PageIterator[types.CheckpointsListResponse, types.Checkpoint]:
        """Every checkpoint of all runs of this key; pages are requested as they are needed."""
        return by_offset(
            lambda offset: self.list_user_checkpoints(page_size, offset), lambda page: page.checkpoints
        )

    iter_user_checkpoints_async = async_iterator(iter_user_checkpoints)

    def delete_checkpoint(self, training_run_id: types.ModelID, checkpoint_id: str) -> Future[None]:
        """Deletes a checkpoint; ``checkpoint_id`` is as listed, such as ``weights/0001``."""
        return background().submit(self._calls.delete_checkpoint(training_run_id, checkpoint_id))

    delete_checkpoint_async = async_result(delete_checkpoint)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> Future[None]:
        """Deletes the checkpoint at a path."""
        return self._change_checkpoint("delete_checkpoint", tinker_path, "delete_checkpoint_from_tinker_path")

    delete_checkpoint_from_tinker_path_async = async_result(delete_checkpoint_from_tinker_path)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> Future[None]:
        """Makes a checkpoint readable for every user of the server."""
        return self._change_checkpoint(
            "publish_checkpoint", tinker_path, "publish_checkpoint_from_tinker_path"
        )

    publish_checkpoint_from_tinker_path_async = async_result(publish_checkpoint_from_tinker_path)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> Future[None]:
        """Makes a checkpoint readable only for its owner again."""
        return self._change_checkpoint(
            "unpublish_checkpoint", tinker_path, "unpublish_checkpoint_from_tinker_path"
        )

    unpublish_checkpoint_from_tinker_path_async = async_result(unpublish_checkpoint_from_tinker_path)

    def set_checkpoint_ttl_from_tinker_path(self, tinker_path: str, ttl_seconds: int | None) -> Future[None]:
        """Makes a checkpoint expire so many seconds from now, or with ``None`` never."""
        return self._change_checkpoint(
            "set_checkpoint_ttl",
            tinker_path,
            "set_checkpoint_ttl_from_tinker_path",
            types.SetCheckpointTTLRequest(ttl_seconds=ttl_seconds),
        )

    set_checkpoint_ttl_from_tinker_path_async = async_result(set_checkpoint_ttl_from_tinker_path)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[types.WeightsInfoResponse]:
        """What a checkpoint contains: base model, rank, which layers are trained."""
        return AwaitableConcurrentFuture(background().submit(self._calls.weights_info(tinker_path)))

    get_weights_info_by_tinker_path_async = async_result(get_weights_info_by_tinker_path)

    def get_external_weights_urls(self, tinker_path: str) -> Future[types.ExternalWeightsUrlsResponse]:
        """A signed URL per file of a checkpoint made with ``save_weights_external``."""
        _check_external(tinker_path)
        return background().submit(self._calls.external_weights_urls(tinker_path))

    get_external_weights_urls_async = async_result(get_external_weights_urls)

    def get_checkpoint_archive_url_from_tinker_path(
        self, tinker_path: str
    ) -> Future[types.CheckpointArchiveUrlResponse]:
        """A signed URL of a checkpoint as one file: ``.result().url``."""
        parsed_path(tinker_path)
        return background().submit(self._calls.archive_url(tinker_path))

    get_checkpoint_archive_url_from_tinker_path_async = async_result(
        get_checkpoint_archive_url_from_tinker_path
    )

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

    copy_weights_async = async_result(copy_weights)

    # ---- sessions and samplers ----

    def get_session(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> Future[types.GetSessionResponse]:
        """The runs and samplers of a session."""
        return background().submit(self._calls.session(session_id, access_scope))

    get_session_async = async_result(get_session)

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> Future[types.ListSessionsResponse]:
        """A page of session ids, newest first."""
        return background().submit(self._calls.sessions(limit, offset, access_scope))

    list_sessions_async = async_result(list_sessions)

    def iter_sessions(
        self, page_size: int = 100, access_scope: AccessScope = "owned"
    ) -> PageIterator[types.ListSessionsResponse, str]:
        """Every session id, newest first; pages are requested as they are needed."""
        return by_offset(
            lambda offset: self.list_sessions(page_size, offset, access_scope), lambda page: page.sessions
        )

    iter_sessions_async = async_iterator(iter_sessions)

    def search_sessions(self, request: types.SessionSearchRequest) -> Future[types.SessionSearchResponse]:
        """A page of the sessions that match, newest first. Experimental: it may change."""
        warn_caller("RestClient.search_sessions is experimental: it may change", ExperimentalWarning)
        return background().submit(self._calls.search(request))

    search_sessions_async = async_result(search_sessions)

    def iter_search_sessions(
        self, request: types.SessionSearchRequest
    ) -> PageIterator[types.SessionSearchResponse, types.SessionSummary]:
        """Every session that matches; ``request.limit`` is the size of a page. Experimental: it may change."""

        def next_page(
            previous: types.SessionSearchResponse | None,
        ) -> Future[types.SessionSearchResponse] | None:
            if previous is None:
                return self.search_sessions(request)
            if previous.next_cursor is None:
                return None
            return self.search_sessions(request.model_copy(update={"cursor": previous.next_cursor}))

        return PageIterator(next_page, lambda page: page.sessions)

    iter_search_sessions_async = async_iterator(iter_search_sessions)

    def assign_session_project(self, session_id: str, project_id: str) -> Future[None]:
        """Moves a session, with everything it created, into a project."""
        return background().submit(self._calls.assign_project(session_id, project_id))

    assign_session_project_async = async_result(assign_session_project)

    def export_session_trace(self, session_id: str) -> Future[str]:
        """The URL of a session's timeline as a Perfetto trace, once that is built."""
        return background().submit(self._calls.export_trace(session_id))

    export_session_trace_async = async_result(export_session_trace)

    def get_sampler(self, sampler_id: str) -> APIFuture[types.GetSamplerResponse]:
        """The base model and the weights of a sampler."""
        return AwaitableConcurrentFuture(background().submit(self._calls.sampler(sampler_id)))

    get_sampler_async = async_result(get_sampler)

    def whoami(self) -> APIFuture[types.WhoamiResponse]:
        """The owner of this key, where the server issues identity tokens."""
        return AwaitableConcurrentFuture(background().submit(self._calls.whoami()))

    whoami_async = async_result(whoami)

    def get_health(self) -> Future[types.HealthResponse]:
        """The health of the server; needs no key."""
        return background().submit(self._calls.health())

    get_health_async = async_result(get_health)

    def get_telemetry(self) -> None:
        """None: this client sends no telemetry."""

    # ---- moved to the admin client ----

    def get_audit_log(
        self, event_type: AuditEvents = "all", day: date | None = None
    ) -> Future[types.AuditLogResponse]:
        """Deprecated: use :meth:`AdminClient.get_audit_log`."""
        return self._admin("get_audit_log").get_audit_log(event_type, day)

    get_audit_log_async = async_result(get_audit_log)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> Future[types.BillingUsageResponse]:
        """Deprecated: use :meth:`AdminClient.get_billing_usage`."""
        return self._admin("get_billing_usage").get_billing_usage(starting_on, ending_before)

    get_billing_usage_async = async_result(get_billing_usage)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> Future[types.CurrentCheckpointStorageUsageResponse]:
        """Deprecated: use :meth:`AdminClient.get_current_checkpoint_storage_usage`."""
        return self._admin("get_current_checkpoint_storage_usage").get_current_checkpoint_storage_usage(
            project_id
        )

    get_current_checkpoint_storage_usage_async = async_result(get_current_checkpoint_storage_usage)

    def _change_checkpoint(
        self,
        endpoint: str,
        tinker_path: str,
        method: str,
        value: types.SetCheckpointTTLRequest | None = None,
    ) -> Future[None]:
        return background().submit(
            self._calls.change_checkpoint(endpoint, parsed_path(tinker_path), method, value)
        )

    def _admin(self, method: str) -> AdminClient:
        from tinkex.clients.admin import AdminClient

        warn_caller(
            f"RestClient.{method} is deprecated; use AdminClient().{method}, which takes the same arguments",
            FutureWarning,
        )
        return AdminClient(caller=self._caller)

    def _project(self, destination: str | None) -> str:
        project = destination or self._caller.config.project_id
        if not project:
            raise ValueError(
                "copy_weights needs a project: pass destination_project_id or set TINKER_PROJECT_ID"
            )
        return project


def _check_external(tinker_path: str) -> None:
    if parsed_path(tinker_path).checkpoint_type != "external":
        raise ValueError(
            f"{tinker_path} is not an exported checkpoint; make one with save_weights_external, "
            "its path is tinker://<run>/external_weights/<name>"
        )
