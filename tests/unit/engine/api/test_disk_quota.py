"""A user cannot store more than the quota, whatever they send; others are not affected."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from tests.engines import started_engine
from tests.unit.engine.api.asgi import Answer, Client
from tests.unit.engine.api.test_custom_losses import definition
from tests.unit.engine.api.test_downloads import save
from tests.unit.engine.api.test_training import optim_step, pass_body, send_pass
from tinkex.engine.api.app import build_app
from tinkex.engine.api.audit import MAX_ENTRIES_WITHOUT_ROOM, AuditedCalls
from tinkex.engine.api.call import Call
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine

SHARE = 200_000
MAX_ATTEMPTS = 600


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    config = EngineConfig(
        home=tmp_path_factory.mktemp("home"),
        models={"tiny": str(tiny_model)},
        long_poll_s=0.25,
        max_disk_bytes_per_user=SHARE,
    )
    with started_engine(config) as started:
        yield started


def user(engine: Engine, name: str) -> Client:
    engine.store.users.add_key(name, f"tml-{name}", 0.0)
    return Client(build_app(engine), f"tml-{name}")


def sessions(client: Client) -> Callable[[int], Answer]:
    return lambda _: client.post("create_session", {"user_metadata": {"note": "x" * 20_000}})


def tags(client: Client) -> Callable[[int], Answer]:
    return lambda n: client.post("create_session", {"tags": ["y" * 100] * n})


def runs(client: Client) -> Callable[[int], Answer]:
    session = client.session()
    lora = {"rank": 1, "seed": 1}
    body = {
        "session_id": session,
        "base_model": "tiny",
        "lora_config": lora,
        "user_metadata": {"n": "x" * 9000},
    }
    return lambda n: client.post("create_model", {**body, "model_seq_id": n})


def samplers(client: Client) -> Callable[[int], Answer]:
    body = {"session_id": client.session(), "base_model": "tiny"}
    return lambda n: client.post("create_sampling_session", {**body, "sampling_session_seq_id": n})


def losses(client: Client) -> Callable[[int], Answer]:
    session = client.session()
    return lambda n: client.post("create_custom_loss", definition(session, n, name="x" * 3000))


def passes_behind_a_gap(client: Client) -> Callable[[int], Answer]:
    run = client.create()
    return lambda n: send_pass(client, pass_body(run, 2 + n, [5 + i % 90 for i in range(200)]))


def samples(client: Client) -> Callable[[int], Answer]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7] * 60}]}
    body = {"base_model": "tiny", "prompt": prompt, "num_samples": 1, "sampling_params": {"max_tokens": 1}}
    return lambda _: client.post("asample", body)


def snapshots(client: Client) -> Callable[[int], Answer]:
    run = client.create()

    def attempt(n: int) -> Answer:
        step = client.post("optim_step", optim_step(run, 2 * n + 1))
        if step.status != 200:
            return step
        body = {"model_id": run, "seq_id": 2 * n + 2, "sampling_session_seq_id": n}
        return outcome(client, client.post("save_weights_for_sampler", body))

    return attempt


def checkpoints(client: Client) -> Callable[[int], Answer]:
    run = client.create()

    def attempt(n: int) -> Answer:
        return outcome(
            client, client.post("save_weights", {"model_id": run, "seq_id": n + 1, "path": f"c{n}"})
        )

    return attempt


def outcome(client: Client, submitted: Answer) -> Answer:
    """The result of an accepted operation, or the response that rejected it."""
    return client.result(submitted) if submitted.status == 200 else submitted


ATTACKS: list[Callable[[Client], Callable[[int], Answer]]] = [
    sessions, tags, runs, samplers, losses, passes_behind_a_gap, samples, snapshots, checkpoints,
]  # fmt: skip


def bytes_on_disk(engine: Engine) -> int:
    """What the rows and files take: pages of the database that are in use, and everything beside it."""
    pragmas = {
        name: engine.store.database.one(f"PRAGMA {name}")[0]  # type: ignore[index]
        for name in ("page_count", "freelist_count", "page_size")
    }
    files = [file for file in engine.store.root.rglob("*") if file.is_file() and "engine.db" not in file.name]
    rows = (pragmas["page_count"] - pragmas["freelist_count"]) * pragmas["page_size"]
    return int(rows) + sum(file.stat().st_size for file in files)


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_nothing_that_a_user_sends_is_stored_beyond_the_quota(
    engine: Engine, attack: Callable[[Client], Callable[[int], Answer]]
) -> None:
    name = attack.__name__.replace("_", "-")
    client = user(engine, name)
    before = bytes_on_disk(engine)
    attempt = attack(client)
    rejected = next(
        answer
        for answer in map(attempt, range(MAX_ATTEMPTS))
        if answer.status == 429 or "a user's quota" in str(answer.json.get("error"))
    )
    text = str(rejected.json)
    assert f"a user's quota is {SHARE}" in text
    assert "your data takes" in text
    if attack not in (snapshots, checkpoints):
        # A sample takes less once it has ended, so a few more may be accepted.
        more = (attempt(MAX_ATTEMPTS + n).status for n in range(MAX_ATTEMPTS))
        assert any(status == next(more) == 429 for status in more), "and so are the next ones"
    # Results of what was accepted may exceed it a little.
    assert engine.store.disk_usage.total(name) < 1.3 * SHARE
    assert bytes_on_disk(engine) - before < 2 * SHARE, "what is counted is what is stored"
    polite = user(engine, f"polite-{name}")
    assert polite.create()
    assert client.get("sessions").status == 200, "reading is free"


def test_a_save_that_would_exceed_the_quota_leaves_nothing(engine: Engine) -> None:
    client = user(engine, "saver")
    run = client.create()
    paths = []
    for number in itertools.count(1):
        request = {"model_id": run, "path": f"c{number}", "seq_id": number, "type": "save_weights"}
        answer = outcome(client, client.post("save_weights", request))
        if answer.status != 200 or "error" in answer.json:
            break
        paths.append(answer.json["path"])
    assert "delete checkpoints" in str(answer.json)
    assert engine.store.disk_usage.total("saver") < 1.05 * SHARE, "the record of the rejected save"
    folder = engine.store.root / "checkpoints" / run.replace(":", "~") / "weights"
    assert sorted(each.name for each in folder.iterdir()) == sorted(path.rpartition("/")[2] for path in paths)
    for name in ("c1", "c2"):
        client.call("DELETE", f"/api/v1/training_runs/{run}/checkpoints/weights/{name}")
    assert answer.status == 429, "its number was not used"
    assert save(client, run, number, "again"), "there is space again"


def test_finishing_and_unloading_work_when_the_quota_is_used_up(engine: Engine) -> None:
    client = user(engine, "finisher")
    session = client.session()
    run = client.create(session)
    attempt = sessions(client)
    while attempt(0).status == 200:
        pass
    unloaded = client.post("unload_model", {"model_id": run, "type": "unload_model"})
    assert client.result(unloaded).json["model_id"] == run
    body: dict[str, Any] = {"reason": {"type": "success"}}
    assert client.post(f"sessions/{session}/finish", body).status == 200


def test_requests_that_store_nothing_else_are_bounded_when_the_quota_is_used_up(engine: Engine) -> None:
    client = user(engine, "caller")
    run = client.create()
    for body in ({"tags": ["y" * 9000]}, {}):
        while client.post("create_session", body).status == 200:
            pass
    before = engine.store.disk_usage.total("caller")
    for _ in range(3 * MAX_ENTRIES_WITHOUT_ROOM):
        assert client.post("auth/token", {}).status == 200
    tokens = [
        row
        for row in engine.store.audit.between("caller", 0, time.time() + 1, None, 1000)
        if row.event == "token_create"
    ]
    assert len(tokens) == MAX_ENTRIES_WITHOUT_ROOM
    for number in range(1, 60):
        assert (
            client.post("optim_step", b'{"model_id": "%s", "seq_id": %d, ' % (run.encode(), number)).status
            == 400
        )
    assert engine.store.journal.used_numbers(run) == []
    assert engine.store.disk_usage.total("caller") < before + 1000 * MAX_ENTRIES_WITHOUT_ROOM


async def test_audited_calls_beyond_the_limit_are_counted_in_one_entry(engine: Engine) -> None:
    client = user(engine, "counted")
    for body in ({"tags": ["y" * 9000]}, {}):
        while (await client.acall("POST", "/api/v1/create_session", body)).status == 200:
            pass
    owner, audited_calls = "counted", AuditedCalls(interval_s=0.2, max_entries=2)

    def num_recorded() -> int:
        rows = engine.store.audit.between(owner, 0, time.time() + 1, None, 1000)
        return sum(row.details.get("further_requests", 1) for row in rows if row.event == "token_create")

    request = Request({"type": "http", "path": "/", "headers": [], "query_string": b""})
    call = Call(
        engine=engine, owner=owner, request=None, body=b"", headers={}, http=request, is_embedded=False
    )
    for _ in range(5):
        audited_calls.record("auth_token", call)
    while num_recorded() < 5:  # noqa: ASYNC110 -- waits for a row of the database
        await asyncio.sleep(0.01)
    audited_calls.record("auth_token", call)
    assert num_recorded() == 6


@pytest.mark.slow
def test_the_journal_of_a_user_who_is_over_the_quota_is_saved_and_pruned(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"models": {"tiny": str(tiny_model)}, "fetched_retention_s": 0.001}
    engine = Engine(
        EngineConfig(home=tmp_path, max_disk_bytes_per_user=300_000, long_poll_s=0.25, **settings)
    )
    engine.start()
    try:
        client = Client(build_app(engine), engine.api_key)
        run = client.create()
        tokens = [5 + i % 90 for i in range(200)]
        for number in itertools.count(1):
            submitted = send_pass(client, pass_body(run, number, tokens))
            if submitted.status != 200:
                break
            client.result(submitted)
        assert submitted.status == 429
        assert "journal" in submitted.detail
        before = engine.store.disk_usage.of("local")["journal"]
        engine.run_retention()
        engine.flush_savepoints()
        assert engine.store.disk_usage.of("local").get("journal", 0) < before / 10
        while (again := send_pass(client, pass_body(run, number, tokens))).status != 200:
            engine.run_retention()  # fetched results are deleted a moment after they were recorded as fetched
        assert client.result(again).status == 200
    finally:
        engine.close()


def test_what_is_left_of_ended_sessions_makes_room_for_a_user_who_is_over_the_quota(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "models": {"tiny": str(tiny_model)},
        "session_grace_s": 0.01,
        "session_silent_s": 0.01,
    }
    engine = Engine(EngineConfig(home=tmp_path, max_disk_bytes_per_user=SHARE, **settings))
    engine.start()
    try:
        ada, bob = Client(build_app(engine), engine.api_key), user(engine, "bob")
        kept = bob.session()
        attempt = sessions(ada)
        while attempt(0).status == 200:
            pass
        rejected = attempt(0)
        assert (rejected.status, "finish sessions" in rejected.detail) == (429, True)
        deadline = time.monotonic() + 60
        while attempt(0).status != 200:
            assert time.monotonic() < deadline
            engine.run_retention()
        assert engine.store.sessions.get(kept) is not None, "others keep theirs for session_retention_s"
    finally:
        engine.close()
