"""The REST client: one request per method, in the protocol's words."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import itertools
import json
import threading
import time
from datetime import UTC, date, datetime
from typing import Any

import pytest

from tests.scripted import ScriptedServer, over_http
from tinkex import types
from tinkex.clients.admin import AdminClient
from tinkex.clients.rest import RestClient
from tinkex.clients.service import ServiceClient
from tinkex.config import Config
from tinkex.errors import APIResponseValidationError, ExperimentalWarning, NotFoundError
from tinkex.futures import APIFuture
from tinkex.testing import MockTransport, Reply, Request, reply

WHEN = "2026-11-15T12:00:00Z"
CHECKPOINT = {
    "checkpoint_id": "weights/0001",
    "checkpoint_type": "training",
    "time": WHEN,
    "tinker_path": "tinker://s:train:0/weights/0001",
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
WEIGHTS = {"base_model": "toy", "is_lora": True, "lora_rank": 8}
PATH = "tinker://s:train:0/weights/0001"
OWNED = {"access_scope": "owned"}

METHODS: list[tuple[str, tuple[Any, ...], Any, str, dict[str, str]]] = [
    ("get_training_run", ("s:train:0",), RUN, "GET training_runs/s:train:0", OWNED),
    (
        "get_training_run_by_tinker_path",
        (PATH, "accessible"),
        RUN,
        "GET training_runs/s:train:0",
        {"access_scope": "accessible"},
    ),
    (
        "list_training_runs",
        (5, 10, "owned", "p1"),
        {"training_runs": [RUN], "cursor": CURSOR},
        "GET training_runs",
        {"limit": "5", "offset": "10", "access_scope": "owned", "project_id": "p1"},
    ),
    (
        "list_checkpoints",
        ("s:train:0",),
        {"checkpoints": [CHECKPOINT]},
        "GET training_runs/s:train:0/checkpoints",
        {},
    ),
    (
        "list_user_checkpoints",
        (),
        {"checkpoints": [CHECKPOINT], "cursor": CURSOR},
        "GET checkpoints",
        {"limit": "100", "offset": "0"},
    ),
    (
        "delete_checkpoint",
        ("s:train:0", "weights/0001"),
        None,
        "DELETE training_runs/s:train:0/checkpoints/weights/0001",
        {},
    ),
    (
        "delete_checkpoint_from_tinker_path",
        (PATH,),
        None,
        "DELETE training_runs/s:train:0/checkpoints/weights/0001",
        {},
    ),
    ("get_weights_info_by_tinker_path", (PATH,), WEIGHTS, "POST weights_info", {}),
    ("get_session", ("s",), {"training_run_ids": ["s:train:0"], "sampler_ids": []}, "GET sessions/s", OWNED),
    ("list_sessions", (), {"sessions": ["s"]}, "GET sessions", {"limit": "20", "offset": "0", **OWNED}),
    (
        "get_sampler",
        ("s:sample:0",),
        {"sampler_id": "s:sample:0", "base_model": "toy"},
        "GET samplers/s:sample:0",
        {},
    ),
    ("get_health", (), {"status": "ok"}, "GET healthz", {}),
    (
        "publish_checkpoint_from_tinker_path",
        (PATH,),
        None,
        "POST training_runs/s:train:0/checkpoints/weights/0001/publish",
        {},
    ),
    (
        "unpublish_checkpoint_from_tinker_path",
        (PATH,),
        None,
        "DELETE training_runs/s:train:0/checkpoints/weights/0001/publish",
        {},
    ),
    (
        "set_checkpoint_ttl_from_tinker_path",
        (PATH, None),
        None,
        "PUT training_runs/s:train:0/checkpoints/weights/0001/ttl",
        {},
    ),
    (
        "get_external_weights_urls",
        ("tinker://s:train:0/external_weights/x",),
        {"urls": {"adapter_model.safetensors": "https://files/1"}, "expires": WHEN},
        "GET training_runs/s:train:0/checkpoints/external_weights/x/external_weights_urls",
        {},
    ),
    (
        "get_checkpoint_archive_url_from_tinker_path",
        (PATH,),
        {"url": "https://files/2", "expires": WHEN},
        "GET training_runs/s:train:0/checkpoints/weights/0001/archive",
        {},
    ),
    ("copy_weights", (PATH, "p2"), {"tinker_path": PATH}, "POST copy_weights", {}),
    ("assign_session_project", ("s", "p1"), None, "PUT sessions/s/project", {}),
    (
        "export_session_trace",
        ("s",),
        {"status": "ready", "url": "https://files/3"},
        "GET sessions/s/trace_export",
        {},
    ),
]
ADMIN_METHODS: list[tuple[str, tuple[Any, ...], Any, str, dict[str, str]]] = [
    (
        "get_audit_log",
        ("checkpoints", date(2026, 7, 13)),
        {"entries": [{"timestamp": WHEN, "event": "checkpoint_deleted"}]},
        "GET audit",
        {"event_type": "checkpoints", "day": "2026-07-13"},
    ),
    (
        "get_billing_usage",
        ("2026-07-13T00:00:00Z", datetime(2026, 7, 14, tzinfo=UTC)),
        {
            "data": [
                {"bucket_start": WHEN, "bucket_end": WHEN, "event_info": {"type": "checkpoint", "count": 2}}
            ]
        },
        "GET billing/usage/events",
        {"starting_on": "2026-07-13T00:00:00Z", "ending_before": "2026-07-14T00:00:00Z"},
    ),
    (
        "get_current_checkpoint_storage_usage",
        ("p1",),
        {"data": [{"checkpoint_count": 1, "size_bytes": 5, "size_gigabytes": 5e-9}]},
        "GET billing/usage/checkpoints/current",
        {"project_id": "p1"},
    ),
]


@pytest.mark.parametrize(
    ("client", "name", "arguments", "answer", "target", "query"),
    [(RestClient, *row) for row in METHODS] + [(AdminClient, *row) for row in ADMIN_METHODS],
    ids=lambda m: str(m)[:30],
)
def test_every_method_sends_its_request_and_reads_its_reply(
    client: Any, name: str, arguments: tuple[Any, ...], answer: Any, target: str, query: dict[str, str]
) -> None:
    transport = MockTransport(lambda _: reply(answer))
    rest = client(transport=transport)
    future = getattr(rest, name)(*arguments)
    assert isinstance(future, concurrent.futures.Future | APIFuture)
    value = future.result(timeout=10)
    again = asyncio.run(getattr(rest, f"{name}_async")(*arguments))
    assert value == again
    assert (value is None) == (answer is None)
    for request in transport.requests:
        assert f"{request.method} {request.path.removeprefix('/api/v1/')}" == target
        assert request.query == query
        assert request.headers.get("x-sdk-method", "get_health") == name
    assert len(transport.requests) == 2


def test_dates_and_nested_values_are_read() -> None:
    rest = RestClient(transport=MockTransport(lambda _: reply(RUN)))
    run = rest.get_training_run("s:train:0").result(timeout=10)
    assert isinstance(run, types.TrainingRun)
    assert run.last_request_time.year == 2026
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == PATH


def test_wrong_arguments_are_said_at_the_call() -> None:
    rest = RestClient(transport=MockTransport(lambda _: reply(RUN)))
    with pytest.raises(ValueError, match="tinker://"):
        rest.get_training_run_by_tinker_path("weights/1")
    with pytest.raises(ValueError, match="access_scope"):
        rest.get_training_run("r", "mine").result(timeout=10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="limit"):
        rest.list_sessions(limit=-1).result(timeout=10)


def test_an_unknown_object_is_a_not_found_error() -> None:
    rest = RestClient(transport=MockTransport(lambda _: reply({"detail": "no run r"}, status=404)))
    with pytest.raises(NotFoundError, match="no run r"):
        rest.get_training_run("r").result(timeout=10)


def test_a_rest_client_of_a_service_shares_its_connections() -> None:
    transport = MockTransport(lambda _: reply({"sessions": []}))
    rest = ServiceClient(transport=transport).create_rest_client()
    rest.list_sessions().result(timeout=10)
    assert transport.requests[0].headers["x-sdk-method"] == "list_sessions"


@pytest.mark.parametrize(
    ("name", "arguments", "answer", "target", "query"), ADMIN_METHODS, ids=lambda m: str(m)[:30]
)
def test_the_admin_methods_still_work_on_the_rest_client_with_a_warning(
    name: str, arguments: tuple[Any, ...], answer: Any, target: str, query: dict[str, str]
) -> None:
    rest = RestClient(transport=MockTransport(lambda _: reply(answer)))
    with pytest.warns(FutureWarning, match=f"AdminClient\\(\\).{name}"):
        value = getattr(rest, name)(*arguments).result(timeout=10)
    with pytest.warns(FutureWarning, match="AdminClient"):
        assert asyncio.run(getattr(rest, f"{name}_async")(*arguments)) == value


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_lifetime_that_is_not_positive_is_rejected_and_nothing_is_sent(seconds: int) -> None:
    transport = MockTransport(lambda request: reply({}))
    with pytest.raises(ValueError, match="ttl_seconds"):
        RestClient(transport=transport).set_checkpoint_ttl_from_tinker_path(PATH, seconds)
    assert transport.requests == []


def test_a_time_to_live_of_none_is_sent() -> None:
    transport = MockTransport(lambda _: reply(None))
    RestClient(transport=transport).set_checkpoint_ttl_from_tinker_path(PATH, None).result(timeout=10)
    assert json.loads(transport.requests[0].body) == {"ttl_seconds": None}


def test_copies_go_to_the_project_of_the_settings_with_one_key_and_the_token_in_a_header() -> None:
    transport = MockTransport(lambda _: reply({"tinker_path": "tinker://copy/weights/1"}))
    rest = RestClient(transport=transport, config=Config(project_id="p9"))
    copied = rest.copy_weights(PATH, ttl_seconds=60, weights_access_token="secret").result(timeout=10)
    assert copied == "tinker://copy/weights/1"
    request = transport.requests[0]
    assert json.loads(request.body) == {
        "source_path": PATH,
        "destination_project_id": "p9",
        "ttl_seconds": 60,
    }
    assert request.headers["x-tinker-weights-access-token"] == "secret"
    assert len(request.headers["x-idempotency-key"]) == 36
    with pytest.raises(ValueError, match="TINKER_PROJECT_ID"):
        RestClient(transport=transport, config=Config()).copy_weights(PATH)


def test_the_url_of_an_archive_may_be_a_redirect() -> None:
    moved = reply(
        {}, status=302, headers={"location": "https://files/9", "expires": "Mon, 16 Nov 2026 01:00:00 GMT"}
    )
    rest = RestClient(transport=MockTransport(lambda _: moved))
    found = rest.get_checkpoint_archive_url_from_tinker_path(PATH).result(timeout=10)
    assert found.url == "https://files/9"
    assert found.expires == datetime(2026, 11, 16, 1, tzinfo=UTC)


def test_a_redirect_to_the_same_server_may_be_relative() -> None:
    moved = reply({}, status=302, headers={"location": "/api/v1/downloads/token/a.tar"})
    rest = RestClient(
        transport=MockTransport(lambda _: moved), config=Config(base_url="http://host:1/prefix")
    )
    found = rest.get_checkpoint_archive_url_from_tinker_path(PATH).result(timeout=10)
    assert found.url == "http://host:1/api/v1/downloads/token/a.tar"


def test_an_audit_log_behind_a_signed_url_is_fetched_without_the_key() -> None:
    """The URL may quote what was asked for, such as the day and the kind of event."""
    entry = {"timestamp": "2026-11-16T01:00:00Z", "event": "deleted"}
    requests: list[Request] = []

    def stored(value: object, request: Request) -> Reply:
        requests.append(request)
        return reply({"entries": [entry]})

    with over_http(ScriptedServer(download=stored)) as url:
        location = f"{url}/api/v1/downloads/checkpoints-2026-11-16/log.json?signature=a%2Fb"
        moved = MockTransport(lambda _: reply({}, status=302, headers={"location": location}))
        admin = AdminClient(transport=moved, config=Config(api_key="tml-0123456789"))
        log = admin.get_audit_log("checkpoints", date(2026, 11, 16)).result(timeout=20)
    assert [item.event for item in log.entries] == ["deleted"]
    assert requests[0].path == "/api/v1/downloads/checkpoints-2026-11-16/log.json"
    assert requests[0].query == {"signature": "a/b"}
    assert "x-api-key" not in requests[0].headers


def test_an_audit_log_that_does_not_follow_the_protocol_is_a_typed_error() -> None:
    with over_http(ScriptedServer(download=lambda *_: reply(b"<html>"))) as url:
        location = f"{url}/api/v1/downloads/secret-token/log.json"
        moved = MockTransport(lambda _: reply({}, status=302, headers={"location": location}))
        admin = AdminClient(transport=moved, config=Config())
        with pytest.raises(APIResponseValidationError, match=r"log\.json") as raised:
            admin.get_audit_log().result(timeout=20)
    assert "secret-token" not in str(raised.value)


def test_only_exported_checkpoints_have_addresses_per_file() -> None:
    rest = RestClient(transport=MockTransport(lambda _: reply({})))
    with pytest.raises(ValueError, match="save_weights_external"):
        rest.get_external_weights_urls(PATH)


def test_a_trace_that_cannot_be_built_is_an_error() -> None:
    rest = RestClient(transport=MockTransport(lambda _: reply({"status": "failed", "error": "too old"})))
    with pytest.raises(RuntimeError, match="too old"):
        rest.export_session_trace("s").result(timeout=10)


def test_searching_says_that_it_is_experimental() -> None:
    transport = MockTransport(lambda _: reply({"sessions": []}))
    rest = RestClient(transport=transport)
    request = types.SessionSearchRequest(display_name="nightly", owner=types.AccessibleSearchOwner())
    with pytest.warns(ExperimentalWarning):
        assert rest.search_sessions(request).result(timeout=10).sessions == []
    with pytest.warns(ExperimentalWarning):
        asyncio.run(rest.search_sessions_async(request))
    assert json.loads(transport.requests[0].body) == {
        "display_name": "nightly",
        "limit": 50,
        "owner": {"type": "accessible"},
        "user_metadata": {},
    }


def test_a_client_can_be_made_from_the_holder_of_a_service() -> None:
    transport = MockTransport(lambda _: reply({"sessions": [], "session_id": "s"}))
    with ServiceClient(transport=transport) as service:
        rest = RestClient(service.holder)
        rest.list_sessions().result(timeout=10)
        with pytest.raises(ValueError, match="not both"):
            AdminClient(service.holder, api_key="tml-key")
    assert "sessions" in transport.paths


def token(claims: dict[str, str]) -> str:
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"eyJhbGciOiJub25lIn0.{payload}.sig"


def test_a_token_says_whose_it_is_without_a_request() -> None:
    transport = MockTransport(lambda _: reply({}))
    key = token({"sub": "tml:user:1", "org_id": "7", "email": ""})
    rest = RestClient(transport=transport, config=Config(api_key=key))
    who = rest.whoami().result(timeout=10)
    assert (who.user_urn, who.org_urn, who.email) == ("tml:user:1", "tml:organization:7", None)
    assert not transport.requests


def test_a_plain_key_is_exchanged_if_the_server_issues_tokens() -> None:
    jwt = token({"sub": "tml:user:1", "org_id": "7", "email": "a@b.c"})

    def serve(request: Any) -> Any:
        return reply({"jwt": jwt} if request.path.endswith("auth/token") else {"pjwt_auth_enabled": True})

    transport = MockTransport(serve)
    rest = RestClient(transport=transport, config=Config(api_key="tml-key"))
    assert asyncio.run(rest.whoami_async()).email == "a@b.c"
    assert transport.requests[-1].headers["x-api-key"] == "tml-key"
    printed = RestClient(transport=transport, config=Config(credential_cmd="echo tml-printed"))
    assert printed.whoami().result(timeout=10).user_urn == "tml:user:1"
    assert transport.requests[-1].headers["x-api-key"] == "tml-printed"
    plain = RestClient(transport=MockTransport(lambda _: reply({})), config=Config(api_key="tml-key"))
    with pytest.raises(RuntimeError, match="no identity"):
        plain.whoami().result(timeout=10)


def test_calls_to_a_server_that_requires_tokens_carry_one() -> None:
    jwt = token({"sub": "tml:user:1", "org_id": "7", "exp": "99999999999"})

    def serve(request: Any) -> Any:
        if request.path.endswith("auth/token"):
            return reply({"jwt": jwt})
        return reply({"pjwt_auth_enabled": True, "sessions": []})

    transport = MockTransport(serve)
    rest = RestClient(transport=transport, config=Config(api_key="tml-key"))
    for _ in range(2):
        rest.list_sessions().result(timeout=10)
    assert transport.paths == ["client/config", "auth/token", "sessions", "sessions"]
    assert [request.headers["x-api-key"] for request in transport.requests] == [
        "tml-key",
        "tml-key",
        jwt,
        jwt,
    ]


def paged(field: str, items: list[Any]) -> Any:
    def serve(request: Any) -> Any:
        offset, limit = int(request.query["offset"]), int(request.query["limit"])
        cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
        return reply({field: items[offset : offset + limit], "cursor": cursor})

    return serve


@pytest.mark.parametrize(
    ("name", "field", "items"),
    [
        ("iter_training_runs", "training_runs", [{**RUN, "training_run_id": f"r{i}"} for i in range(5)]),
        (
            "iter_user_checkpoints",
            "checkpoints",
            [{**CHECKPOINT, "checkpoint_id": f"c{i}"} for i in range(5)],
        ),
        ("iter_sessions", "sessions", [f"s{i}" for i in range(5)]),
    ],
)
def test_iterators_go_through_every_page(name: str, field: str, items: list[Any]) -> None:
    transport = MockTransport(paged(field, items))
    rest = RestClient(transport=transport)
    found = list(getattr(rest, name)(page_size=2))
    assert len(found) == 5
    assert [int(r.query["offset"]) for r in transport.requests] == [0, 2, 4, 5]

    async def collected() -> list[Any]:
        return [item async for item in getattr(rest, f"{name}_async")(page_size=2)]

    assert asyncio.run(collected()) == found


def test_an_iterator_over_a_server_that_ignores_the_offset_ends() -> None:
    rest = RestClient(transport=MockTransport(lambda _: reply({"checkpoints": [CHECKPOINT]})))
    found: list[str] = []
    with pytest.raises(APIResponseValidationError, match="same page"):
        found.extend(one.tinker_path for one in rest.iter_user_checkpoints(page_size=5))
    assert found == [PATH]


def test_an_iterator_passes_over_items_that_were_moved_to_the_next_page() -> None:
    sessions = ["b", "a"]

    def serve(request: Request) -> Reply:
        offset = int(request.query["offset"])
        page = sessions[offset : offset + 1]
        if offset == 0:
            sessions.insert(0, "c")  # a new one, after the first page was read
        return reply({"sessions": page})

    assert list(RestClient(transport=MockTransport(serve)).iter_sessions(page_size=1)) == ["b", "a"]


def test_an_iterator_fetches_a_page_only_when_it_is_needed() -> None:
    transport = MockTransport(paged("sessions", ["a", "b", "c"]))
    first = next(iter(RestClient(transport=transport).iter_sessions(page_size=1)))
    assert first == "a"
    assert len(transport.requests) == 1


def test_the_checkpoints_of_a_run_can_be_iterated() -> None:
    rest = RestClient(transport=MockTransport(lambda _: reply({"checkpoints": [CHECKPOINT]})))
    assert [c.tinker_path for c in rest.iter_checkpoints("s:train:0")] == [PATH]

    async def collected() -> list[str]:
        return [c.tinker_path async for c in rest.iter_checkpoints_async("s:train:0")]

    assert asyncio.run(collected()) == [PATH]


def test_callbacks_of_one_client_are_called_one_after_the_other_in_order() -> None:
    added, gate = threading.Event(), threading.Event()
    numbers = itertools.count(1)

    async def answer(_: Request) -> Reply:
        number = next(numbers)
        while not added.is_set() or (number == 2 and not first.done()):  # noqa: ASYNC110 -- set by another thread
            await asyncio.sleep(0.001)
        return reply(RUN)

    rest = RestClient(transport=MockTransport(answer))
    called: list[int] = []
    first, second = rest.get_training_run("r"), rest.get_training_run("r")
    answered = threading.Event()
    second.call_when_done(lambda _: answered.set())

    def wait_for_the_second(_: object) -> None:
        answered.wait(30)
        gate.wait(0.2)  # time for the other callback, if it had a thread of its own
        called.append(1)

    first.add_done_callback(wait_for_the_second)
    second.add_done_callback(lambda _: (called.append(2), gate.set()))
    added.set()
    first.result(30)
    deadline = time.monotonic() + 30
    while len(called) < 2 and time.monotonic() < deadline:
        time.sleep(0.002)
    assert called == [1, 2]
