"""The REST client: runs, checkpoints, sessions, samplers and images, without a session of its own."""

from __future__ import annotations

from datetime import date, datetime
from typing import TYPE_CHECKING

from tinkex import types
from tinkex.clients._assets import AssetMethods
from tinkex.clients._checks import check_ttl
from tinkex.clients._docstrings import documented
from tinkex.clients._loop_records import RunRecordMethods
from tinkex.clients._paging import PageIterator, by_cursor, by_offset
from tinkex.clients._raw_calls import RawMethods
from tinkex.clients._rest_calls import AccessScope, AuditEvents, parsed_path, weights_info
from tinkex.clients._sessionless import SessionlessClient
from tinkex.clients._twins import async_form, async_iterator
from tinkex.clients._warnings import warn_caller
from tinkex.errors import ExperimentalWarning
from tinkex.futures import AwaitableConcurrentFuture

if TYPE_CHECKING:
    from tinkex.clients.admin import AdminClient

__all__ = ["AccessScope", "RestClient", "weights_info"]


@documented("rest")
class RestClient(AssetMethods, RunRecordMethods, RawMethods, SessionlessClient):
    """Reads and manages what a server stores.

    ::

        rest = tinkex.RestClient(base_url="local")
        for run in rest.iter_training_runs():
            print(run.training_run_id, run.base_model)

    Methods return futures, which have ``result()`` and can be awaited. ``list_…`` returns one page,
    ``iter_…`` every item of all pages.
    """

    # ---- runs ----

    def get_training_run(
        self, training_run_id: types.ModelID, access_scope: AccessScope = "owned"
    ) -> AwaitableConcurrentFuture[types.TrainingRun]:
        """One training run."""
        return self._calls.start(self._calls.training_run(training_run_id, access_scope, "get_training_run"))

    get_training_run_async = async_form(get_training_run)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> AwaitableConcurrentFuture[types.TrainingRun]:
        """The run that a checkpoint belongs to."""
        run_id = parsed_path(tinker_path).training_run_id
        return self._calls.start(
            self._calls.training_run(run_id, access_scope, "get_training_run_by_tinker_path")
        )

    get_training_run_by_tinker_path_async = async_form(get_training_run_by_tinker_path)

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> AwaitableConcurrentFuture[types.TrainingRunsResponse]:
        """A page of training runs, newest first."""
        return self._calls.start(self._calls.training_runs(limit, offset, access_scope, project_id))

    list_training_runs_async = async_form(list_training_runs)

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

    def list_checkpoints(
        self, training_run_id: types.ModelID
    ) -> AwaitableConcurrentFuture[types.CheckpointsListResponse]:
        """Every checkpoint of a run."""
        return self._calls.start(self._calls.checkpoints(training_run_id))

    list_checkpoints_async = async_form(list_checkpoints)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0
    ) -> AwaitableConcurrentFuture[types.CheckpointsListResponse]:
        """A page of the checkpoints of all runs of this key."""
        return self._calls.start(self._calls.user_checkpoints(limit, offset))

    list_user_checkpoints_async = async_form(list_user_checkpoints)

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

    def delete_checkpoint(
        self, training_run_id: types.ModelID, checkpoint_id: str
    ) -> AwaitableConcurrentFuture[None]:
        """Deletes a checkpoint; ``checkpoint_id`` is as listed, such as ``weights/0001``."""
        return self._calls.start(self._calls.delete_checkpoint(training_run_id, checkpoint_id))

    delete_checkpoint_async = async_form(delete_checkpoint)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> AwaitableConcurrentFuture[None]:
        """Deletes the checkpoint at a path."""
        return self._change_checkpoint("delete_checkpoint", tinker_path, "delete_checkpoint_from_tinker_path")

    delete_checkpoint_from_tinker_path_async = async_form(delete_checkpoint_from_tinker_path)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> AwaitableConcurrentFuture[None]:
        """Makes a checkpoint readable for every user of the server."""
        return self._change_checkpoint(
            "publish_checkpoint", tinker_path, "publish_checkpoint_from_tinker_path"
        )

    publish_checkpoint_from_tinker_path_async = async_form(publish_checkpoint_from_tinker_path)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> AwaitableConcurrentFuture[None]:
        """Makes a checkpoint readable only for its owner again."""
        return self._change_checkpoint(
            "unpublish_checkpoint", tinker_path, "unpublish_checkpoint_from_tinker_path"
        )

    unpublish_checkpoint_from_tinker_path_async = async_form(unpublish_checkpoint_from_tinker_path)

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> AwaitableConcurrentFuture[None]:
        """Makes a checkpoint expire so many seconds from now, or with ``None`` never."""
        check_ttl(ttl_seconds)
        return self._change_checkpoint(
            "set_checkpoint_ttl",
            tinker_path,
            "set_checkpoint_ttl_from_tinker_path",
            types.SetCheckpointTTLRequest(ttl_seconds=ttl_seconds),
        )

    set_checkpoint_ttl_from_tinker_path_async = async_form(set_checkpoint_ttl_from_tinker_path)

    def get_weights_info_by_tinker_path(
        self, tinker_path: str
    ) -> AwaitableConcurrentFuture[types.WeightsInfoResponse]:
        """What a checkpoint contains: base model, rank, which layers are trained."""
        return self._calls.start(self._calls.weights_info(tinker_path))

    get_weights_info_by_tinker_path_async = async_form(get_weights_info_by_tinker_path)

    def get_external_weights_urls(
        self, tinker_path: str
    ) -> AwaitableConcurrentFuture[types.ExternalWeightsUrlsResponse]:
        """A signed URL per file of a checkpoint made with ``save_weights_external``."""
        _check_external(tinker_path)
        return self._calls.start(self._calls.external_weights_urls(tinker_path))

    get_external_weights_urls_async = async_form(get_external_weights_urls)

    def get_checkpoint_archive_url_from_tinker_path(
        self, tinker_path: str
    ) -> AwaitableConcurrentFuture[types.CheckpointArchiveUrlResponse]:
        """A signed URL of a checkpoint as one file: ``.result().url``."""
        parsed, method = parsed_path(tinker_path), "get_checkpoint_archive_url_from_tinker_path"
        return self._calls.start(
            self._calls.archive_url(parsed.training_run_id, parsed.checkpoint_id, method)
        )

    get_checkpoint_archive_url_from_tinker_path_async = async_form(
        get_checkpoint_archive_url_from_tinker_path
    )

    def get_checkpoint_archive_url(
        self, training_run_id: types.ModelID, checkpoint_id: str
    ) -> AwaitableConcurrentFuture[types.CheckpointArchiveUrlResponse]:
        """As :meth:`get_checkpoint_archive_url_from_tinker_path`, by run; ``checkpoint_id`` is as listed, such as ``weights/0001``."""
        return self._calls.start(
            self._calls.archive_url(training_run_id, checkpoint_id, "get_checkpoint_archive_url")
        )

    get_checkpoint_archive_url_async = async_form(get_checkpoint_archive_url)

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
        return self._calls.start(copying)

    copy_weights_async = async_form(copy_weights)

    def search_checkpoints(
        self, request: types.CheckpointSearchRequest
    ) -> AwaitableConcurrentFuture[types.CheckpointSearchResponse]:
        """A page of the checkpoints that match, newest first. Experimental: it may change."""
        _warn_experimental("search_checkpoints")
        return self._calls.start(self._calls.search_checkpoints(request))

    search_checkpoints_async = async_form(search_checkpoints)

    def iter_search_checkpoints(
        self, request: types.CheckpointSearchRequest
    ) -> PageIterator[types.CheckpointSearchResponse, types.Checkpoint]:
        """Every checkpoint that matches; ``request.limit`` is the size of a page. Experimental: it may change."""
        return by_cursor(request, self.search_checkpoints, lambda page: page.checkpoints)

    iter_search_checkpoints_async = async_iterator(iter_search_checkpoints)

    def external_weights_upload_start(
        self, *, base_model: str, lora_config: types.LoraConfig, destination_project_id: str | None = None
    ) -> AwaitableConcurrentFuture[types.ExternalWeightsUploadStartResult]:
        """Starts an upload of files in the format of ``save_weights_external``. Experimental: it may change.

        ::

            upload = rest.external_weights_upload_start(base_model=model, lora_config=LoraConfig(rank=32)).result()
            for name, url in upload.urls.items():
                httpx.put(url, content=(directory / name).read_bytes()).raise_for_status()
            path = rest.external_weights_upload_finish(upload.upload_id).result().tinker_path

        ``tinkex.checkpoints.upload_checkpoint`` does all of it, with retries and progress.
        """
        _warn_experimental("external_weights_upload_start")
        request = types.ExternalWeightsUploadStartRequest(
            base_model=base_model, lora_config=lora_config, destination_project_id=destination_project_id
        )
        return self._calls.start(self._calls.start_weights_upload(request))

    external_weights_upload_start_async = async_form(external_weights_upload_start)

    def external_weights_upload_finish(
        self, upload_id: str
    ) -> AwaitableConcurrentFuture[types.ExternalWeightsUploadFinishResult]:
        """Turns an upload into a checkpoint; its files are validated first. Experimental: it may change."""
        _warn_experimental("external_weights_upload_finish")
        return self._calls.start(self._calls.finish_weights_upload(upload_id))

    external_weights_upload_finish_async = async_form(external_weights_upload_finish)

    def external_weights_upload_cancel(self, upload_id: str) -> AwaitableConcurrentFuture[None]:
        """Deletes an unfinished upload and its files; only servers of this package have it."""
        return self._calls.start(self._calls.cancel_weights_upload(upload_id))

    external_weights_upload_cancel_async = async_form(external_weights_upload_cancel)

    # ---- sessions and samplers ----

    def get_session(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> AwaitableConcurrentFuture[types.GetSessionResponse]:
        """The runs and samplers of a session."""
        return self._calls.start(self._calls.session(session_id, access_scope))

    get_session_async = async_form(get_session)

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> AwaitableConcurrentFuture[types.ListSessionsResponse]:
        """A page of session ids, newest first."""
        return self._calls.start(self._calls.sessions(limit, offset, access_scope))

    list_sessions_async = async_form(list_sessions)

    def iter_sessions(
        self, page_size: int = 100, access_scope: AccessScope = "owned"
    ) -> PageIterator[types.ListSessionsResponse, str]:
        """Every session id, newest first; pages are requested as they are needed."""
        return by_offset(
            lambda offset: self.list_sessions(page_size, offset, access_scope), lambda page: page.sessions
        )

    iter_sessions_async = async_iterator(iter_sessions)

    def search_sessions(
        self, request: types.SessionSearchRequest
    ) -> AwaitableConcurrentFuture[types.SessionSearchResponse]:
        """A page of the sessions that match, newest first. Experimental: it may change."""
        _warn_experimental("search_sessions")
        return self._calls.start(self._calls.search(request))

    search_sessions_async = async_form(search_sessions)

    def iter_search_sessions(
        self, request: types.SessionSearchRequest
    ) -> PageIterator[types.SessionSearchResponse, types.SessionSummary]:
        """Every session that matches; ``request.limit`` is the size of a page. Experimental: it may change."""
        return by_cursor(request, self.search_sessions, lambda page: page.sessions)

    iter_search_sessions_async = async_iterator(iter_search_sessions)

    def assign_session_project(self, session_id: str, project_id: str) -> AwaitableConcurrentFuture[None]:
        """Moves a session, with everything it created, into a project."""
        return self._calls.start(self._calls.assign_project(session_id, project_id))

    assign_session_project_async = async_form(assign_session_project)

    def export_session_trace(self, session_id: str) -> AwaitableConcurrentFuture[str]:
        """The URL of a session's timeline as a Perfetto trace, once that is built."""
        return self._calls.start(self._calls.export_trace(session_id))

    export_session_trace_async = async_form(export_session_trace)

    def get_sampler(self, sampler_id: str) -> AwaitableConcurrentFuture[types.GetSamplerResponse]:
        """The base model and the weights of a sampler."""
        return self._calls.start(self._calls.sampler(sampler_id))

    get_sampler_async = async_form(get_sampler)

    def whoami(self) -> AwaitableConcurrentFuture[types.WhoamiResponse]:
        """The owner of this key, where the server issues identity tokens."""
        return self._calls.start(self._calls.whoami())

    whoami_async = async_form(whoami)

    def get_health(self) -> AwaitableConcurrentFuture[types.HealthResponse]:
        """The health of the server; needs no key."""
        return self._calls.start(self._calls.health())

    get_health_async = async_form(get_health)

    def get_server_capabilities(self) -> AwaitableConcurrentFuture[types.GetServerCapabilitiesResponse]:
        """The base models that the server offers.

        ::

            print(rest.get_server_capabilities().result().model_names())
        """
        return self._calls.start(self._calls.capabilities())

    get_server_capabilities_async = async_form(get_server_capabilities)

    def get_telemetry(self) -> None:
        """None: this client sends no telemetry."""

    # ---- moved to the admin client ----

    def get_audit_log(
        self, event_type: AuditEvents = "all", day: date | None = None
    ) -> AwaitableConcurrentFuture[types.AuditLogResponse]:
        """Deprecated: use :meth:`AdminClient.get_audit_log`."""
        return self._admin("get_audit_log").get_audit_log(event_type, day)

    get_audit_log_async = async_form(get_audit_log)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> AwaitableConcurrentFuture[types.BillingUsageResponse]:
        """Deprecated: use :meth:`AdminClient.get_billing_usage`."""
        return self._admin("get_billing_usage").get_billing_usage(starting_on, ending_before)

    get_billing_usage_async = async_form(get_billing_usage)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> AwaitableConcurrentFuture[types.CurrentCheckpointStorageUsageResponse]:
        """Deprecated: use :meth:`AdminClient.get_current_checkpoint_storage_usage`."""
        return self._admin("get_current_checkpoint_storage_usage").get_current_checkpoint_storage_usage(
            project_id
        )

    get_current_checkpoint_storage_usage_async = async_form(get_current_checkpoint_storage_usage)

    def _change_checkpoint(
        self,
        endpoint: str,
        tinker_path: str,
        method: str,
        value: types.SetCheckpointTTLRequest | None = None,
    ) -> AwaitableConcurrentFuture[None]:
        return self._calls.start(
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


def _warn_experimental(method: str) -> None:
    warn_caller(f"RestClient.{method} is experimental: it may change", ExperimentalWarning)


def _check_external(tinker_path: str) -> None:
    if parsed_path(tinker_path).checkpoint_type != "external":
        raise ValueError(
            f"{tinker_path} is not an exported checkpoint; make one with save_weights_external, "
            "its path is tinker://<run>/external_weights/<name>"
        )
