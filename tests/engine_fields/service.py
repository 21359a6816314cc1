"""Proofs for sessions, searches and results."""

from __future__ import annotations

from typing import Any

from tests.engine_fields.rig import Rig, assert_rejected
from tests.engine_fields.table import proves
from tests.unit.engine.api.asgi import PROTO


def opened(rig: Rig, **changes: Any) -> str:
    session: str = rig.ada.post("create_session", {"tags": [], "sdk_version": "0", **changes}).json[
        "session_id"
    ]
    return session


def search(rig: Rig, **filters: Any) -> list[str]:
    """The sessions that match, newest first."""
    found = rig.ada.post("sessions/search", filters)
    assert found.status == 200, found.body
    return [each["session_id"] for each in found.json["sessions"]]


@proves("CreateSessionRequest.tags")
def session_tags(rig: Rig) -> None:
    row = rig.engine.store.sessions.get(opened(rig, tags=["a", "b"]))
    assert row is not None
    assert sorted(row.tags) == ["a", "b"]


@proves("CreateSessionRequest.user_metadata", "CreateSessionRequest.display_name")
def session_metadata(rig: Rig) -> None:
    shown = rig.ada.get(f"sessions/{opened(rig, user_metadata={'a': 'b'}, display_name='mine')}").json
    assert (shown["user_metadata"], shown["display_name"]) == ({"a": "b"}, "mine")


@proves("CreateSessionRequest.project_id")
def session_project(rig: Rig) -> None:
    session = opened(rig, project_id="desk")
    assert search(rig, project_ids=["desk"]) == [session]


@proves("SessionHeartbeatRequest.session_id")
def heartbeat(rig: Rig) -> None:
    assert_rejected(rig.ada.post("session_heartbeat", {"session_id": "nowhere"}), "nowhere", 404)
    assert rig.ada.post("session_heartbeat", {"session_id": opened(rig)}).status == 200


@proves("FinishSessionRequest.reason", "FinishSessionRequest.detail", "FinishReason.type")
def finish(rig: Rig) -> None:
    session = opened(rig)
    body = {"reason": {"type": "errored"}, "detail": "out of coffee"}
    assert rig.ada.call("POST", f"/api/v1/sessions/{session}/finish", body).status < 300
    [found] = rig.ada.post("sessions/search", {"session_id": session}).json["sessions"]
    assert found["status"]["reason"]["type"] == "errored"
    assert found["status"]["detail"] == "out of coffee"
    bad = {"reason": {"type": "bored"}, "detail": None}
    assert_rejected(rig.ada.call("POST", f"/api/v1/sessions/{opened(rig)}/finish", bad), "bored")


@proves(
    "SessionSearchRequest.session_id",
    "SessionSearchRequest.project_ids",
    "SessionSearchRequest.user_metadata",
    "SessionSearchRequest.display_name",
)
def search_filters(rig: Rig) -> None:
    session = opened(rig, project_id="attic", user_metadata={"who": "eve"}, display_name="A rare name")
    opened(rig)
    for name, fits, other in (
        ("session_id", session, "nowhere"),
        ("project_ids", ["attic"], ["cellar"]),
        ("user_metadata", {"who": "eve"}, {"who": "mallory"}),
        ("display_name", "rare", "usual"),
    ):
        assert search(rig, **{name: fits}) == [session]
        assert search(rig, **{name: other}) == []


@proves("SessionSearchRequest.owner", "UserSearchOwner.owner_urns")
def search_owner(rig: Rig) -> None:
    session = opened(rig)
    assert session in search(rig, owner={"type": "own"})
    assert search(rig, owner={"type": "user", "owner_urns": ["somebody-else"]}) == []
    assert session in search(rig, owner={"type": "user", "owner_urns": ["local"]})


@proves("SessionSearchRequest.statuses", "ClientFinishedSessionStatusQuery.reasons")
def search_statuses(rig: Rig) -> None:
    session = opened(rig)
    assert search(rig, session_id=session, statuses=[{"type": "active"}]) == [session]
    assert search(rig, session_id=session, statuses=[{"type": "client_finished"}]) == []
    body = {"reason": {"type": "success"}, "detail": None}
    rig.ada.call("POST", f"/api/v1/sessions/{session}/finish", body)
    for reasons, expected in ((["success"], [session]), (["errored"], [])):
        statuses = [{"type": "client_finished", "reasons": reasons}]
        assert search(rig, session_id=session, statuses=statuses) == expected


@proves(
    "SessionSearchRequest.limit",
    "SessionSearchRequest.cursor",
    "SessionSearchCursor.last_created_at",
    "SessionSearchCursor.last_session_id",
)
def search_pages(rig: Rig) -> None:
    made = [opened(rig, project_id="pages") for _ in range(3)]
    first = rig.ada.post("sessions/search", {"project_ids": ["pages"], "limit": 2}).json
    assert len(first["sessions"]) == 2
    rest = search(rig, project_ids=["pages"], cursor=first["next_cursor"])
    assert sorted([*(each["session_id"] for each in first["sessions"]), *rest]) == sorted(made)
    long_ago = {**first["next_cursor"], "last_created_at": "2000-01-01T00:00:00Z"}
    assert search(rig, project_ids=["pages"], cursor=long_ago) == []
    same_moment = {**first["next_cursor"], "last_session_id": "0"}
    assert len(search(rig, project_ids=["pages"], cursor=same_moment)) == 2


@proves("AssignProjectRequest.project_id")
def assign_project(rig: Rig) -> None:
    session = opened(rig)
    assert rig.ada.call("PUT", f"/api/v1/sessions/{session}/project", {"project_id": "moved"}).status < 300
    assert search(rig, project_ids=["moved"]) == [session]


@proves("FutureRetrieveRequest.request_id")
def retrieve(rig: Rig) -> None:
    assert_rejected(rig.ada.post("retrieve_future", {"request_id": "nothing"}), "nothing", 404)
    results = [rig.ada.result(rig.submit_sample({"seed": seed}), accept=PROTO).body for seed in (1, 2)]
    assert results[0] != results[1]


@proves("FutureRetrieveRequest.allow_metadata_only")
def retrieve_metadata(rig: Rig) -> None:
    submitted = rig.submit_sample({"max_tokens": 1}, num_samples=1024, topk_sample_logprobs=160)
    whole = rig.ada.result(submitted, accept=PROTO)
    body = {"request_id": submitted.json["request_id"], "allow_metadata_only": True}
    metadata = rig.ada.post("retrieve_future", body, accept=PROTO).json
    assert metadata == {"status": "complete_metadata", "response_payload_size": len(whole.body)}


@proves("CancelFutureRequest.request_id")
def cancel(rig: Rig) -> None:
    long = [rig.submit_sample({"max_tokens": 500}, num_samples=64) for _ in range(2)]
    assert rig.ada.post("cancel_future", {"request_id": long[1].json["request_id"]}).status == 200
    assert "cancelled" in rig.ada.result(long[1], accept=PROTO).json["error"]
    rig.ada.post("cancel_future", {"request_id": long[0].json["request_id"]})


def poll_completions(rig: Rig, sampler: str, clone: int = 0, **changes: Any) -> Any:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": clone}
    return rig.ada.post("retrieve_futures", {"target": target, "prev_cursor": 0, "timeout": 0, **changes})


@proves(
    "FuturesRetrieveRequest.target",
    "SamplingSessionFuturesTarget.sampling_session_id",
    "SamplingSessionFuturesTarget.cloned_sampler_id",
    "FuturesRetrieveRequest.prev_cursor",
    "FuturesRetrieveRequest.retrieved_request_ids",
)
def retrieve_many(rig: Rig) -> None:
    mine, other = rig.sampler(), rig.sampler()
    submitted = rig.submit_sample(sampling_session_id=mine, seq_id=0)
    rig.ada.result(submitted)
    reply = poll_completions(rig, mine).json
    assert [each["request_id"] for each in reply["completions"]] == [submitted.json["request_id"]]
    assert poll_completions(rig, other).json["completions"] == []
    assert poll_completions(rig, mine, clone=3).json["completions"] == []
    assert poll_completions(rig, mine, prev_cursor=reply["cursor"]).json["completions"] == []
    poll_completions(rig, mine, retrieved_request_ids=[submitted.json["request_id"]])
    assert_rejected(
        rig.ada.post("retrieve_future", {"request_id": submitted.json["request_id"]}), "gone", 410
    )
    assert_rejected(poll_completions(rig, "nowhere:sample:0"), "nowhere:sample:0", 404)


@proves("FuturesRetrieveRequest.timeout")
def retrieve_many_timeout(rig: Rig) -> None:
    """A poll with a timeout returns a sample that a poll without one misses."""
    for _ in range(20):
        sampler = rig.sampler()
        rig.submit_sample({"max_tokens": 60}, sampling_session_id=sampler, seq_id=0)
        hurried = poll_completions(rig, sampler, timeout=0).json["completions"]
        patient = poll_completions(rig, sampler, timeout=30).json["completions"]
        if not hurried and patient:
            return
    raise AssertionError("the timeout made no difference")
