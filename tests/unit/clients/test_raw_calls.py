"""Calls by path have the client's key, retries and events; results of operations are polled by their id."""

from __future__ import annotations

from typing import Any

import pytest

import tinkex
from tests.recording import Recorder
from tests.scripted import ScriptedServer
from tinkex import types
from tinkex._wire import json
from tinkex.observability.events import RequestFinished, RetryScheduled
from tinkex.testing import MockTransport, Reply, Request, reply, sample_reply

CONFIG = tinkex.Config(
    api_key="tml-key-of-a-test", base_url="http://mock", default_query={"team": "a"}, max_retries=3
)


def echo(request: Request) -> Reply:
    return reply(
        {
            "method": request.method,
            "path": request.path,
            "query": dict(request.query),
            "key": request.headers.get("x-api-key"),
            "type": request.headers.get("content-type"),
            "custom": request.headers.get("x-custom"),
            "body": json.decode_any(request.body) if request.body else None,
            "timeout": request.timeout,
        }
    )


@pytest.mark.parametrize(
    ("method", "arguments", "expected"),
    [
        ("get", ("/api/v1/healthz",), {"method": "GET", "body": None}),
        ("get", ("/api/v1/new?a=1&b=2",), {"query": {"team": "a", "a": "1", "b": "2"}}),
        ("post", ("/api/v1/weights_info", {"tinker_path": None}), {"body": {"tinker_path": None}, "method": "POST"}),
        ("post", ("/api/v1/new", types.LoraConfig(rank=2)), {"type": "application/json"}),
        ("put", ("/api/v1/new", [1, 2]), {"method": "PUT", "body": [1, 2]}),
        ("delete", ("/api/v1/new",), {"method": "DELETE", "body": None}),
    ],
)  # fmt: skip
async def test_a_call_by_path_is_a_call_of_the_client(
    method: str, arguments: tuple[Any, ...], expected: dict[str, Any]
) -> None:
    recorder = Recorder()
    rest = tinkex.RestClient(config=CONFIG, transport=MockTransport(echo), events=recorder)
    answers = [
        getattr(rest, method)(*arguments, headers={"X-Custom": "1"}, timeout=7).result(),
        await getattr(rest, f"{method}_async")(*arguments, headers={"X-Custom": "1"}, timeout=7),
    ]
    for answer in answers:
        assert {key: answer[key] for key in expected} == expected
        assert (answer["key"], answer["custom"], answer["timeout"]) == ("tml-key-of-a-test", "1", 7)
        assert answer["query"]["team"] == "a"
    assert sum(isinstance(event, RequestFinished) for event in recorder.events) == 2


@pytest.mark.parametrize("path", ["api/v1/healthz", "http://elsewhere/api", "//elsewhere/api", "/a\r\nb", ""])
def test_only_paths_of_this_server_are_called(path: str) -> None:
    transport = MockTransport(echo)
    rest = tinkex.RestClient(config=CONFIG, transport=transport)
    with pytest.raises(ValueError, match="path"):
        rest.get(path).result()
    assert transport.requests == []


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"query": {"": 1}}, "query"),
        ({"query": {"a": object()}}, "query"),
        (
            {"querry": {"a": 1}},
            r"no option 'querry'; did you mean 'query'\?; available: query, headers, timeout",
        ),
        ({"raw": True}, "no option 'raw'; available: query"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": "soon"}, "seconds"),
        ({"max_retries": -1}, "max_retries"),
        ({"max_retries": 1.5}, "max_retries"),
        ({"headers": {"two words": "x"}}, "header name"),
        ({"headers": {"x-a": "b\r\nx-c: d"}}, "control"),
    ],
)
def test_invalid_options_of_a_call_raise_immediately(options: dict[str, Any], word: str) -> None:
    transport = MockTransport(echo)
    rest = tinkex.RestClient(config=CONFIG, transport=transport)
    with pytest.raises((ValueError, TypeError), match=word):
        rest.get("/api/v1/new", **options)
    assert transport.requests == []


def test_parameters_without_a_value_are_left_out() -> None:
    rest = tinkex.RestClient(config=CONFIG, transport=MockTransport(echo))
    answer = rest.get("/api/v1/new?a=1", query={"a": 2, "b": None, "c": True}).result()
    assert answer["query"] == {"team": "a", "a": "2", "c": "true"}


def test_a_call_by_path_is_retried_with_one_idempotency_key_and_raises_typed_errors() -> None:
    statuses = iter([503, 200, 503, 404])
    transport = MockTransport(
        lambda request: reply({"detail": "no"}, status=next(statuses), headers={"retry-after-ms": "1"})
    )
    recorder = Recorder()
    rest = tinkex.RestClient(config=CONFIG, transport=transport, events=recorder)
    assert rest.post("/api/v1/new", {}).result() == {"detail": "no"}
    keys = [request.headers["x-idempotency-key"] for request in transport.requests]
    assert len(keys) == 2
    assert len(set(keys)) == 1
    assert sum(isinstance(event, RetryScheduled) for event in recorder.events) == 1
    with pytest.raises(tinkex.InternalServerError):
        rest.post("/api/v1/new", {}, max_retries=0).result()
    with pytest.raises(tinkex.NotFoundError):
        rest.get("/api/v1/new").result()


def test_the_whole_response_can_be_read() -> None:
    transport = MockTransport(lambda request: Reply(202, {"x-answer": "yes"}, b"plain " + request.body))
    rest = tinkex.RestClient(config=CONFIG, transport=transport)
    response = rest.request("POST", "/api/v1/new", b"bytes", headers={"content-type": "text/plain"}).result()
    assert (response.status, response.headers["x-answer"], response.text) == (202, "yes", "plain bytes")
    assert response.elapsed_s >= 0
    with pytest.raises(tinkex.APIResponseValidationError, match="not JSON"):
        rest.get("/api/v1/new").result()


def test_a_redirect_is_returned_and_not_followed() -> None:
    headers = {"location": "http://files/a.tar?signature=1", "expires": "Tue, 01 Jan 2030 00:00:00 GMT"}
    transport = MockTransport(lambda request: Reply(302, headers))
    rest = tinkex.RestClient(config=CONFIG, transport=transport)
    path = "/api/v1/training_runs/r/checkpoints/weights/a/archive"
    assert rest.get(path).result() == {
        "url": headers["location"],
        "status": 302,
        "expires": headers["expires"],
    }
    assert rest.request("GET", path).result().headers["location"] == headers["location"]
    assert len(transport.requests) == 2


def test_a_form_has_nested_fields_and_files() -> None:
    bodies: list[tuple[str, bytes]] = []

    def receive(request: Request) -> Reply:
        bodies.append((request.headers["content-type"], request.body))
        return reply({"stored": 1})

    rest = tinkex.RestClient(config=CONFIG, transport=MockTransport(receive))
    fields = {"note": {"lang": "en", "tags": ["a", "b"]}, "draft": True, "ttl": None}
    assert rest.post("/api/v1/new", fields, files={"file": ("a.txt", b"hello")}).result() == {"stored": 1}
    ((content_type, body),) = bodies
    assert content_type.startswith("multipart/form-data; boundary=")
    names = [
        b'name="note[lang]"',
        b'name="note[tags][]"',
        b'name="draft"',
        b'name="ttl"',
        b'name="file"; filename="a.txt"',
    ]
    positions = [body.index(name) for name in names]  # fmt: skip
    assert positions == sorted(positions)
    assert body.count(b'name="note[tags][]"') == 2
    assert b"hello" in body


@pytest.mark.parametrize("files", [{}, [], None])
def test_a_body_without_files_is_json(files: Any) -> None:
    transport = MockTransport(echo)
    tinkex.RestClient(config=CONFIG, transport=transport).post("/api/v1/new", [1, 2], files=files).result()
    assert transport.requests[0].headers["content-type"] == "application/json"
    assert transport.requests[0].body == b"[1,2]"


@pytest.mark.parametrize("body", [[1], "text", b"bytes"])
def test_the_body_of_a_form_is_a_mapping(body: Any) -> None:
    rest = tinkex.RestClient(config=CONFIG, transport=MockTransport(echo))
    with pytest.raises(TypeError, match="mapping"):
        rest.post("/api/v1/new", body, files=[b"x"]).result()


async def test_an_archive_is_found_by_run_and_checkpoint() -> None:
    def archive(request: Request) -> Reply:
        return reply({"url": f"http://files{request.path}", "expires": "2030-01-01T00:00:00Z"})

    transport = MockTransport(archive)
    rest = tinkex.RestClient(config=CONFIG, transport=transport)
    urls = [
        rest.get_checkpoint_archive_url("s:train:0", "weights/a").result().url,
        (await rest.get_checkpoint_archive_url_async("s:train:0", "weights/a")).url,
        rest.get_checkpoint_archive_url_from_tinker_path("tinker://s:train:0/weights/a").result().url,
    ]
    assert len(set(urls)) == 1
    assert transport.paths[0] == "training_runs/s:train:0/checkpoints/weights/a/archive"


def test_a_client_shows_its_settings_without_secrets() -> None:
    service = tinkex.ServiceClient(config=CONFIG, transport=MockTransport(echo))
    assert service.config is CONFIG
    assert service.create_rest_client().config is CONFIG
    assert "tml-key-of-a-test" not in repr(service.config)


@pytest.mark.parametrize(
    ("result_type", "expected"),
    [
        (None, {"metrics": {"grad": 1.0}}),
        (types.OptimStepResponse, types.OptimStepResponse(metrics={"grad": 1.0})),
    ],
)
async def test_a_result_is_polled_by_its_id_alone(result_type: Any, expected: object) -> None:
    server = ScriptedServer(retrieve_future=lambda value, request: reply({"metrics": {"grad": 1.0}}))
    service = tinkex.ServiceClient(config=CONFIG, transport=server.transport)
    assert service.poll("request-7", result_type).result() == expected
    assert await service.poll_async("request-7", result_type) == expected
    assert {value.request_id for value in server.values("retrieve_future")} == {"request-7"}


def test_a_sample_is_polled_by_its_id_alone() -> None:
    server = ScriptedServer(retrieve_future=lambda value, request: sample_reply([1, 2], [3]))
    service = tinkex.ServiceClient(config=CONFIG, transport=server.transport)
    response = service.poll("request-7", types.SampleResponse).result()
    assert [sequence.tokens for sequence in response.sequences] == [[1, 2], [3]]


def test_a_failed_operation_that_is_polled_by_its_id_raises_its_error() -> None:
    answer = reply({"error": "the run is gone", "category": "user"})
    server = ScriptedServer(retrieve_future=lambda value, request: answer)
    service = tinkex.ServiceClient(config=CONFIG, transport=server.transport)
    with pytest.raises(tinkex.RequestFailedError, match="the run is gone") as raised:
        service.poll("request-7").result()
    assert raised.value.request_id == "request-7"
    with pytest.raises(ValueError, match="no operation has a result of type"):
        service.poll("request-7", types.Checkpoint)
