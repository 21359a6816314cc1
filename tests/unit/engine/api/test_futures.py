"""Polling for results: one request, all of a sampler, metadata only, and cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.engine.api.asgi import PROTO, Client
from tests.unit.engine.api.test_sampling import request, sampler
from tinkex.engine.api.futures import LARGE_RESULT
from tinkex.engine.engine import Engine

CLONE = 1_000_000_000


def poll_completions(client: Client, sampler_id: str, clone: int = 0, **more: Any) -> dict[str, Any]:
    target = {"type": "sampling_session", "sampling_session_id": sampler_id, "cloned_sampler_id": clone}
    answer = client.post("retrieve_futures", {"target": target, "prev_cursor": 0, **more})
    assert answer.status == 200, answer.body
    reply: dict[str, Any] = answer.json
    return reply


def ended(client: Client, sampler_id: str, count: int, clone: int = 0) -> list[dict[str, Any]]:
    """Polls until ``count`` samples have ended."""
    found: list[dict[str, Any]] = []
    cursor = 0
    for _ in range(200):
        reply = poll_completions(client, sampler_id, clone, prev_cursor=cursor)
        found, cursor = found + reply["completions"], reply["cursor"]
        if len(found) >= count:
            return found
    raise AssertionError("they did not end")


def test_one_poll_returns_all_ended_samples(ada: Client) -> None:
    sampler_id = sampler(ada)
    ids = [ada.post("asample", request(sampler_id, n)).json["request_id"] for n in range(3)]
    found = ended(ada, sampler_id, 3)
    assert sorted(each["request_id"] for each in found) == sorted(ids)
    assert {each["state"] for each in found} == {"finished"}
    for each in found:
        result = ada.post("retrieve_future", {"request_id": each["request_id"]}, accept=PROTO)
        assert len(result.body) == each["response_payload_uncompressed_size"]


def test_polling_continues_from_the_cursor(ada: Client) -> None:
    sampler_id = sampler(ada)
    ada.result(ada.post("asample", request(sampler_id, 0)))
    first = poll_completions(ada, sampler_id)
    second = ada.post("asample", request(sampler_id, 1)).json["request_id"]
    reply = poll_completions(ada, sampler_id, prev_cursor=first["cursor"])
    for _ in range(20):
        if reply["completions"]:
            break
        reply = poll_completions(ada, sampler_id, prev_cursor=first["cursor"])
    assert [each["request_id"] for each in reply["completions"]] == [second]
    empty = poll_completions(ada, sampler_id, prev_cursor=reply["cursor"], timeout=0)
    assert empty == {"completions": [], "cursor": reply["cursor"]}


def test_a_poll_waits_until_a_sample_ends(ada: Client) -> None:
    sampler_id = sampler(ada)

    async def both() -> dict[str, Any]:
        target = {"sampling_session_id": sampler_id}
        poll = asyncio.create_task(ada.acall("POST", "/api/v1/retrieve_futures", {"target": target}))
        await asyncio.sleep(0)
        await ada.acall("POST", "/api/v1/asample", request(sampler_id))
        reply: dict[str, Any] = (await poll).json
        return reply

    assert len(asyncio.run(both())["completions"]) <= 1  # 1, unless the poll timed out first


def test_each_client_gets_only_its_own_samples(ada: Client) -> None:
    sampler_id = sampler(ada)
    joined = [
        ada.post("join_sampling_session", {"sampling_session_id": sampler_id}).json["client_counter"]
        for _ in range(2)
    ]
    assert joined == [1, 2]
    own = ada.post("asample", request(sampler_id, 0)).json["request_id"]
    cloned = ada.post("asample", request(sampler_id, CLONE + 0)).json["request_id"]
    assert [each["request_id"] for each in ended(ada, sampler_id, 1)] == [own]
    assert [each["request_id"] for each in ended(ada, sampler_id, 1, clone=1)] == [cloned]
    assert poll_completions(ada, sampler_id, 2, timeout=0)["completions"] == []


def test_acknowledged_results_are_deleted(ada: Client) -> None:
    sampler_id = sampler(ada)
    submitted = ada.post("asample", request(sampler_id))
    ada.result(submitted)
    request_id = submitted.json["request_id"]
    poll_completions(ada, sampler_id, timeout=0, retrieved_request_ids=[request_id, "req-unknown"])
    assert ada.post("retrieve_future", {"request_id": request_id}).status == 410


def test_other_users_cannot_poll_join_or_acknowledge(ada: Client, bob: Client) -> None:
    sampler_id = sampler(ada)
    submitted = ada.post("asample", request(sampler_id))
    ada.result(submitted)
    target = {"sampling_session_id": sampler_id}
    assert bob.post("retrieve_futures", {"target": target}).status == 404
    assert bob.post("join_sampling_session", target).status == 404
    own = sampler(bob)
    poll_completions(bob, own, timeout=0, retrieved_request_ids=[submitted.json["request_id"]])
    assert ada.result(submitted, accept=PROTO).status == 200


@pytest.mark.slow
def test_the_size_of_a_large_result_is_returned_first_on_request(ada: Client) -> None:
    sampler_id = sampler(ada)
    big = {**request(sampler_id, num_samples=1024, max_tokens=1), "topk_sample_logprobs": 128}
    submitted = ada.post("asample", big)
    request_id = submitted.json["request_id"]
    whole = ada.result(submitted, accept=PROTO)
    assert whole.status == 200, whole.body
    body = {"request_id": request_id, "allow_metadata_only": True}
    answer = ada.post("retrieve_future", body, accept=PROTO)
    assert len(whole.body) > LARGE_RESULT, "the test needs a large result"
    assert answer.json == {"status": "complete_metadata", "response_payload_size": len(whole.body)}
    small = ada.post("asample", request(sampler_id, 1))
    ada.result(small)
    body = {"request_id": small.json["request_id"], "allow_metadata_only": True}
    assert ada.post("retrieve_future", body, accept=PROTO).headers["content-type"] == PROTO


@pytest.mark.slow
def test_a_cancelled_sample_leaves_the_batch_and_is_returned_as_failed(ada: Client, engine: Engine) -> None:
    sampler_id = sampler(ada)
    with engine.paused():
        long_ones = [
            ada.post("asample", request(sampler_id, n, max_tokens=200)).json["request_id"] for n in range(70)
        ]
        for request_id in long_ones[:10]:
            assert ada.post("cancel_future", {"request_id": request_id}).status == 200
    for request_id in long_ones[10:]:
        assert ada.post("cancel_future", {"request_id": request_id}).status == 200
    found = ended(ada, sampler_id, 70)
    assert {each["request_id"] for each in found} == set(long_ones)
    assert all(each["state"] == "failed" for each in found if each["request_id"] in long_ones[:10])
    last = ada.result(ada.post("asample", request(sampler_id, 100)), accept=PROTO)
    assert last.headers["content-type"] == PROTO
