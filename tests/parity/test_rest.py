"""The REST and admin clients of both packages: the same requests on the wire, the same values back."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
import threading
import urllib.request
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import UTC, date, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
import tinker

import tinkex
from tests.servers import ServedEngine

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

WHEN = "2026-11-15T12:00:00Z"
PATH = "tinker://s:train:0/weights/0001"
CHECKPOINT = {
    "checkpoint_id": "weights/0001",
    "checkpoint_type": "training",
    "time": WHEN,
    "tinker_path": PATH,
    "user_metadata": {"step": "1"},
}
RUN = {
    "training_run_id": "s:train:0",
    "base_model": "toy",
    "model_owner": "me",
    "is_lora": True,
    "last_request_time": WHEN,
    "last_checkpoint": CHECKPOINT,
}
CURSOR = {"offset": 0, "limit": 20, "total_count": 1}
SUMMARY = {
    "session_id": "s",
    "created_at": WHEN,
    "owner": "me",
    "project_id": "p",
    "checkpoints_count": 2,
    "status": {"type": "failed", "category": "user", "reason": {"type": "request", "request_id": "r", "request_type": "Sample"}, "message": "no"},
}  # fmt: skip
USAGE = {
    "bucket_start": WHEN,
    "bucket_end": WHEN,
    "event_info": {"type": "sampling_prefill", "cached": True, "token_count": 3},
}

CALLS: list[tuple[str, str, tuple[Any, ...], Any]] = [
    ("RestClient", "get_training_run", ("s:train:0",), RUN),
    ("RestClient", "get_training_run_by_tinker_path", (PATH, "accessible"), RUN),
    ("RestClient", "list_training_runs", (5, 1, "owned", "p"), {"training_runs": [RUN], "cursor": CURSOR}),
    ("RestClient", "list_checkpoints", ("s:train:0",), {"checkpoints": [CHECKPOINT]}),
    ("RestClient", "list_user_checkpoints", (), {"checkpoints": [CHECKPOINT], "cursor": CURSOR}),
    ("RestClient", "get_weights_info_by_tinker_path", (PATH,), {"base_model": "toy", "is_lora": True, "lora_rank": 8}),
    ("RestClient", "delete_checkpoint", ("s:train:0", "weights/0001"), {}),
    ("RestClient", "delete_checkpoint_from_tinker_path", (PATH,), {}),
    ("RestClient", "publish_checkpoint_from_tinker_path", (PATH,), {}),
    ("RestClient", "unpublish_checkpoint_from_tinker_path", (PATH,), {}),
    ("RestClient", "set_checkpoint_ttl_from_tinker_path", (PATH, 3600), {}),
    ("RestClient", "set_checkpoint_ttl_from_tinker_path", (PATH, None), {}),
    ("RestClient", "get_external_weights_urls", ("tinker://s:train:0/external_weights/x",), {"urls": {"a": "https://h/a"}, "expires": WHEN}),
    ("RestClient", "copy_weights", (PATH, "p2"), {"tinker_path": PATH}),
    ("RestClient", "get_session", ("s",), {"training_run_ids": ["a"], "sampler_ids": [], "display_name": "x"}),
    ("RestClient", "list_sessions", (3, 4, "accessible"), {"sessions": ["s"]}),
    ("RestClient", "assign_session_project", ("s", "p"), {}),
    ("RestClient", "export_session_trace", ("s",), {"status": "ready", "url": "https://h/t"}),
    ("RestClient", "get_sampler", ("s:sample:0",), {"sampler_id": "s:sample:0", "base_model": "toy"}),
    ("RestClient", "get_audit_log", (), {"entries": []}),
    ("AdminClient", "get_audit_log", ("teams", date(2026, 7, 13)), {"entries": [{"timestamp": WHEN, "event": "e", "event_details": {"a": None}}]}),
    ("AdminClient", "get_billing_usage", ("2026-07-13T00:00:00Z", datetime(2026, 7, 14, tzinfo=UTC)), {"data": [USAGE], "sessions": {"s": {"user_metadata": {"a": "b"}}}}),
    ("AdminClient", "get_current_checkpoint_storage_usage", ("p",), {"data": [{"checkpoint_count": 1, "size_bytes": 2, "size_gigabytes": 0.5}]}),
    ("AdminClient", "get_current_checkpoint_storage_usage", (), {"data": []}),
]  # fmt: skip


class Recorder(ThreadingHTTPServer):
    """Answers every call with one value and remembers what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Recording)
        self.seen: list[dict[str, Any]] = []
        self.answer: Any = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Recording(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Recorder

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        target = urlsplit(self.path)
        settings = target.path.endswith(("/client/config", "/client/dynamic_config"))
        if not settings:
            self.server.seen.append(
                {
                    "method": self.command,
                    "path": target.path,
                    "query": sorted(parse_qsl(target.query)),
                    "body": json.loads(body) if body.strip() not in {b"", b"{}"} else None,
                    "said": (self.headers.get("x-sdk-method"), self.headers.get("x-sdk-version")),
                }
            )
        content = json.dumps({} if settings else self.server.answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = handle_any

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    server = Recorder()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def plain(value: Any) -> Any:
    return value.model_dump(mode="json", exclude_none=True) if hasattr(value, "model_dump") else value


@pytest.mark.parametrize(
    ("client", "name", "arguments", "answer"), CALLS, ids=[f"{c[0]}.{c[1]}" for c in CALLS]
)
def test_both_packages_ask_and_read_the_same(
    recorder: Recorder, client: str, name: str, arguments: tuple[Any, ...], answer: Any
) -> None:
    recorder.answer, recorder.seen = answer, []
    values, kinds = [], []
    for package in (tinker, tinkex):
        made = getattr(package, client)(base_url=recorder.url, api_key="tml-test")
        future = getattr(made, name)(*arguments)
        found = {"concurrent": isinstance(future, Future), "awaitable": isinstance(future, package.APIFuture)}
        kinds.append({name for name, holds in found.items() if holds})
        values.append(plain(future.result(timeout=20)))
    ours = getattr(tinkex, client)(base_url=recorder.url, api_key="tml-test")
    values.append(plain(asyncio.run(getattr(ours, f"{name}_async")(*arguments))))
    assert len(recorder.seen) == 3
    assert recorder.seen[1] == recorder.seen[0]
    assert recorder.seen[2] == recorder.seen[0]
    assert values[1] == values[0]
    assert values[2] == values[0]
    assert kinds[0] <= kinds[1], "ours can be used in every way that the official one can"


def test_both_packages_search_the_same(recorder: Recorder) -> None:
    recorder.answer, recorder.seen = {"sessions": [SUMMARY]}, []
    found = []
    for package in (tinker, tinkex):
        types = package.types
        question = types.SessionSearchRequest(
            display_name="x",
            owner=types.UserSearchOwner(owner_urns=["u"]),
            statuses=[types.ClientFinishedSessionStatusQuery(reasons=["errored"])],
            cursor=types.SessionSearchCursor(
                last_created_at=datetime(2026, 1, 1, tzinfo=UTC), last_session_id="s"
            ),
        )
        rest = package.RestClient(base_url=recorder.url, api_key="tml-test")
        with pytest.warns(package.ExperimentalWarning):
            found.append(plain(rest.search_sessions(question).result(timeout=20)))
    assert recorder.seen[0] == recorder.seen[1]
    assert found[0] == found[1]


@pytest.mark.parametrize("package", [tinker, tinkex], ids=lambda p: p.__name__)
def test_both_rest_clients_manage_checkpoints_of_our_server(
    package: Any, served_engine: ServedEngine
) -> None:
    login = {"base_url": served_engine.url, "api_key": served_engine.key}
    name = f"rest of {package.__name__}"
    rest = package.RestClient(**login)
    with package.ServiceClient(**login, display_name=name) as service:
        training = service.create_lora_training_client("tiny/llama", rank=4)
        path = training.save_state("kept").result().path

        def kept() -> Any:
            return rest.list_checkpoints(training.model_id).result().checkpoints[0]

        rest.publish_checkpoint_from_tinker_path(path).result()
        assert kept().public
        rest.unpublish_checkpoint_from_tinker_path(path).result()
        assert not kept().public
        rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
        assert kept().expires_at is not None
        rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
        assert kept().expires_at is None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", package.ExperimentalWarning)
            request = package.types.SessionSearchRequest(display_name=name)
            (session,) = rest.search_sessions(request).result().sessions
        assert session.checkpoints_count == 1
        assert isinstance(session.status, package.types.SessionActive)
        rest.assign_session_project(session.session_id, f"project-{package.__name__}").result()
        runs = rest.list_training_runs(project_id=f"project-{package.__name__}").result().training_runs
        assert training.model_id in [run.training_run_id for run in runs]
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert rest.list_checkpoints(training.model_id).result().checkpoints == []


@pytest.mark.slow
@pytest.mark.parametrize("package", [tinker, tinkex], ids=lambda p: p.__name__)
def test_both_export_and_copy_weights_of_our_server(package: Any, served_engine: ServedEngine) -> None:
    login = {"base_url": served_engine.url, "api_key": served_engine.key}
    rest = package.RestClient(**login)
    with package.ServiceClient(**login, project_id="kept-things") as service:
        training = service.create_lora_training_client("tiny/llama", rank=4)
        path = training.save_state("original").result().path
        exported = training.save_weights_external("out", ttl_seconds=3600).result().path
        answer = rest.get_external_weights_urls(exported).result()
        assert answer.expires.tzinfo is not None
        for name, url in answer.urls.items():
            with urllib.request.urlopen(url, timeout=20) as file:
                assert len(file.read()) == int(file.headers["content-length"]) > 0, name
        copied = service.copy_weights(path, ttl_seconds=7200).result()
        assert copied != path
        assert rest.copy_weights(path, "elsewhere").result() not in {path, copied}
        info = rest.get_weights_info_by_tinker_path(copied).result()
        assert (info.base_model, info.lora_rank) == ("tiny/llama", 4)
        resumed = service.create_training_client_from_state_with_optimizer(copied)
        assert resumed.get_info().lora_rank == 4
        again = service.create_training_client_from_state(path, weights_access_token=served_engine.key)
        assert again.get_info().lora_rank == 4


@pytest.mark.slow
@pytest.mark.parametrize("package", [tinker, tinkex], ids=lambda p: p.__name__)
def test_both_read_what_was_done_and_used_on_our_server(package: Any, served_engine: ServedEngine) -> None:
    login = {"base_url": served_engine.url, "api_key": served_engine.key}
    rest, admin = package.RestClient(**login), package.AdminClient(**login)
    with package.ServiceClient(**login, user_metadata={"why": "usage"}) as service:
        training = service.create_lora_training_client("tiny/llama", rank=4)
        training.save_state("counted").result()
        session_id = training.model_id.partition(":")[0]
        url = rest.export_session_trace(session_id).result()
        with urllib.request.urlopen(url, timeout=20) as file:
            names = [event["name"] for event in json.load(file)["traceEvents"]]
        assert {"create_model", "save_weights"} <= set(names)
        entries = admin.get_audit_log("checkpoints").result().entries
        assert training.model_id in [entry.model_id for entry in entries]
        hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        window = (hour - timedelta(hours=1), hour + timedelta(hours=1))
        used = admin.get_billing_usage(*window).result()
        mine = [event for event in used.data if event.session_id == session_id]
        kinds = {event.event_info.type for event in mine}
        assert "checkpoint" in kinds <= {"checkpoint", "storage"}
        assert used.sessions[session_id].user_metadata == {"why": "usage"}
        assert sum(
            item.checkpoint_count for item in admin.get_current_checkpoint_storage_usage().result().data
        )


def test_archives_are_for_older_clients_and_ours(served_engine: ServedEngine) -> None:
    login = {"base_url": served_engine.url, "api_key": served_engine.key}
    rest = tinkex.RestClient(**login)
    with tinkex.ServiceClient(**login) as service:
        path = service.create_lora_training_client("tiny/llama", rank=4).save_state("a").result().path
    found = rest.get_checkpoint_archive_url_from_tinker_path(path).result()
    with urllib.request.urlopen(found.url, timeout=20) as file:
        assert int(file.headers["content-length"]) > 0
        with tarfile.open(fileobj=io.BytesIO(file.read())) as tar:
            assert "adapter_model.safetensors" in tar.getnames()


def test_our_iterators_go_through_all_pages_of_our_server(served_engine: ServedEngine) -> None:
    login = {"base_url": served_engine.url, "api_key": served_engine.key}
    rest = tinkex.RestClient(**login)
    with tinkex.ServiceClient(**login) as service:
        training = service.create_lora_training_client("tiny/llama", rank=4)
        saved = [training.save_state(name).result().path for name in ("a", "b", "c")]
        assert [c.tinker_path for c in rest.iter_checkpoints(training.model_id)] == saved
        assert set(saved) <= {c.tinker_path for c in rest.iter_user_checkpoints(page_size=2)}
        assert training.model_id in {run.training_run_id for run in rest.iter_training_runs(page_size=1)}
        everything = list(rest.iter_sessions(page_size=1))
        assert len(everything) == len(set(everything)) >= 1
