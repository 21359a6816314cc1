from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from tinkex.engine.store import (
    GradientCleared,
    LoopEvent,
    MetricKey,
    MetricReader,
    MetricSource,
    PassEnded,
    RunRow,
    RunStatus,
    SessionRow,
    StepEnded,
    Store,
    open_reader,
)
from tinkex.engine.store.loop_metrics import (
    GRADIENT_NORM,
    LOSS_MEAN,
    LOSS_SUM,
    MAX_NAMES,
    NAME_BYTES,
    TOKENS,
    TOKENS_PER_S,
    VALUE_BYTES,
)
from tinkex.errors import InvalidInput


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "engine") as opened:
        yield opened


def add_run(store: Store, run_id: str, owner: str = "ada") -> None:
    session = f"session-of-{owner}"
    if store.sessions.get(session) is None:
        store.sessions.add(SessionRow(session_id=session, owner=owner, created_at=0.0, seen_at=0.0))
    store.runs.add(RunRow(run_id, session, owner, "tiny", 0.0, 0.0, RunStatus.LIVE))


def passed(
    run_id: str, loss: float, more: Mapping[str, float] | None = None, *, datums: int = 1
) -> PassEnded:
    return PassEnded(run_id, "ada", 10, datums, 1.0, {LOSS_SUM: loss, **(more or {})})


def stepped(run_id: str, norm: float = 0.5) -> StepEnded:
    return StepEnded(run_id, "ada", {GRADIENT_NORM: norm, "step:unique": 7.0})


def values(
    store: Store, run_id: str, name: str, source: MetricSource = MetricSource.AUTOMATIC
) -> dict[int, float | None]:
    series = store.loop_metrics.series([run_id], MetricKey(name, source))
    return {point.step: point.value for point in series[run_id].points} if series else {}


def test_a_step_has_the_sum_of_its_passes_and_the_metrics_of_its_result(store: Store) -> None:
    add_run(store, "a")
    store.loop_metrics.record([passed("a", 3.0, {"weights:sum": 4.0})], 2.0)
    store.loop_metrics.record([passed("a", 5.0, {"weights:sum": 4.0}), stepped("a")], 3.0)
    store.loop_metrics.record([passed("a", 1.0), stepped("a", 0.25)], 5.0)
    assert values(store, "a", LOSS_SUM) == {1: 8.0, 2: 1.0}
    assert values(store, "a", LOSS_MEAN) == {1: 1.0, 2: 0.1}
    assert values(store, "a", GRADIENT_NORM) == {1: 0.5, 2: 0.25}
    assert values(store, "a", TOKENS) == {1: 20.0, 2: 10.0}
    assert values(store, "a", TOKENS_PER_S) == {1: 10.0, 2: 5.0}
    assert MetricKey("step:unique") not in store.loop_metrics.names("a")
    progress = store.loop_metrics.progress(["a", "unknown"])
    assert (progress["a"].step, progress["a"].tokens, progress["a"].stepped_at) == (2, 30, 5.0)
    assert progress.keys() == {"a"}


def test_metrics_of_passes_are_combined_by_the_suffix_of_their_names(store: Store) -> None:
    add_run(store, "a")
    first = {"gap:mean": 1.0, "worst:max": 3.0, "best:min": 3.0, "hash:hash2": 9.0}
    second = {"gap:mean": 4.0, "worst:max": 2.0, "best:min": 2.0, "late:sum": 1.0}
    store.loop_metrics.record([passed("a", 1.0, first, datums=2), passed("a", 1.0, second)], 2.0)
    store.loop_metrics.record([stepped("a")], 3.0)
    assert values(store, "a", "gap:mean") == {1: 2.0}
    assert values(store, "a", "worst:max") == {1: 3.0}
    assert values(store, "a", "best:min") == {1: 2.0}
    assert values(store, "a", "late:sum") == {1: 1.0}
    assert values(store, "a", "hash:hash2") == {}


def test_passes_before_a_load_belong_to_no_step(store: Store) -> None:
    add_run(store, "a")
    events: list[LoopEvent] = [passed("a", 100.0), GradientCleared("a"), passed("a", 2.0), stepped("a")]
    store.loop_metrics.record(events, 2.0)
    assert values(store, "a", LOSS_SUM) == {1: 2.0}


def test_a_transaction_that_is_rolled_back_and_repeated_counts_once(store: Store) -> None:
    add_run(store, "a")
    store.loop_metrics.record([passed("a", 1.0)], 1.0)

    def fail() -> None:
        with store.database.transaction():
            store.loop_metrics.record([passed("a", 2.0), stepped("a")], 2.0)
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail()
    store.loop_metrics.record([passed("a", 2.0), stepped("a")], 2.0)
    assert values(store, "a", LOSS_SUM) == {1: 3.0}
    assert store.loop_metrics.progress(["a"])["a"].step == 1


def test_a_logged_value_replaces_that_of_its_step_and_counts_once(store: Store) -> None:
    add_run(store, "a")
    before = store.disk_usage.of("ada").get("metrics", 0)
    for _ in range(2):
        store.loop_metrics.log("a", "ada", 5, {"accuracy": 0.5}, 1.0)
    store.loop_metrics.log("a", "ada", 5, {"accuracy": 0.75, "kl": 0.1}, 2.0)
    assert values(store, "a", "accuracy", MetricSource.LOGGED) == {5: 0.75}
    sizes = sum(NAME_BYTES + len(name) for name in ("accuracy", "kl")) + 2 * VALUE_BYTES
    assert store.disk_usage.of("ada")["metrics"] - before == 300 + sizes


def test_the_loop_and_the_server_may_use_one_name(store: Store) -> None:
    add_run(store, "a")
    store.loop_metrics.record([passed("a", 3.0), stepped("a")], 1.0)
    store.loop_metrics.log("a", "ada", 1, {LOSS_SUM: 9.0}, 1.0)
    assert values(store, "a", LOSS_SUM) == {1: 3.0}
    assert values(store, "a", LOSS_SUM, MetricSource.LOGGED) == {1: 9.0}
    latest = store.loop_metrics.latest(["a"], [LOSS_SUM])["a"]
    assert {key.source: point.value for key, point in latest.items()} == {
        MetricSource.AUTOMATIC: 3.0,
        MetricSource.LOGGED: 9.0,
    }


def test_what_is_not_finite_is_a_gap(store: Store) -> None:
    add_run(store, "a")
    for step, value in enumerate([1.0, math.nan, math.inf, 2.0]):
        store.loop_metrics.log("a", "ada", step, {"x": value}, 1.0)
    assert values(store, "a", "x", MetricSource.LOGGED) == {0: 1.0, 1: None, 2: None, 3: 2.0}


@pytest.mark.slow
def test_a_long_series_keeps_its_spikes_gaps_and_ends_and_is_exact_on_zoom(store: Store) -> None:
    add_run(store, "a")
    store.loop_metrics.log("a", "ada", 0, {"x": 0.0}, 0.0)
    [(metric_id,)] = store.database.all("SELECT metric_id FROM metrics")
    spikes = {31_337: 1e6, 77_777: -1e6}
    with store.database.transaction() as execute:
        execute.many(
            "INSERT OR REPLACE INTO metric_values VALUES (?, ?, ?, ?, ?)",
            [
                (
                    metric_id,
                    step,
                    None if step == 50_000 else spikes.get(step, math.sin(step)),
                    step * 1.0,
                    step,
                )
                for step in range(100_000)
            ],
        )
    key = MetricKey("x", MetricSource.LOGGED)
    series = store.loop_metrics.series(["a"], key, max_points=500)["a"]
    points = {point.step: point.value for point in series.points}
    assert len(points) <= 500
    assert (series.num_values, series.is_exact) == (100_000, False)
    assert [*points] == sorted(points)
    assert points[31_337] == 1e6
    assert points[77_777] == -1e6
    assert points[50_000] is None
    assert {0, 99_999} <= points.keys()
    zoomed = store.loop_metrics.series(["a"], key, start=31_000, stop=31_499, max_points=500)["a"]
    assert zoomed.is_exact
    assert [point.step for point in zoomed.points] == [*range(31_000, 31_500)]
    assert zoomed.points[337] == (31_337, 1e6, 31_337.0, 31_337)


def test_a_reader_sees_only_the_runs_of_its_owner(store: Store) -> None:
    add_run(store, "a", "ada")
    add_run(store, "b", "bob")
    for run, owner in (("a", "ada"), ("b", "bob")):
        store.loop_metrics.log(run, owner, 1, {"x": 1.0}, 1.0)
    key = MetricKey("x", MetricSource.LOGGED)
    metrics = store.loop_metrics
    assert metrics.series(["a", "b"], key, owner="ada").keys() == {"a"}
    assert metrics.latest(["a", "b"], owner="bob").keys() == {"b"}
    assert metrics.names("b", owner="ada") == []
    assert metrics.new_values("b", {}, owner="ada") == {}
    assert metrics.progress(["a", "b"], owner="ada").keys() == {"a"}
    assert metrics.series(["a", "b"], key).keys() == {"a", "b"}


def test_a_run_may_log_a_limited_number_of_names(store: Store) -> None:
    add_run(store, "a")
    store.loop_metrics.log("a", "ada", 1, {f"m{n}": 1.0 for n in range(MAX_NAMES)}, 1.0)
    store.loop_metrics.log("a", "ada", 2, {"m0": 2.0}, 1.0)
    with pytest.raises(InvalidInput, match="'one more' is new"):
        store.loop_metrics.log("a", "ada", 3, {"one more": 1.0}, 1.0)
    assert values(store, "a", "m0", MetricSource.LOGGED) == {1: 1.0, 2: 2.0}


def test_a_reader_gets_the_values_after_those_it_has_seen(store: Store) -> None:
    add_run(store, "a")
    for step in range(1, 6):
        store.loop_metrics.log("a", "ada", step, {"x": float(step)}, 1.0)
    store.loop_metrics.log("a", "ada", 1, {"y": 1.0}, 1.0)
    x, y = MetricKey("x", MetricSource.LOGGED), MetricKey("y", MetricSource.LOGGED)
    new = store.loop_metrics.new_values("a", {x: 3, y: 1})
    assert {key: [point.step for point in points] for key, points in new.items()} == {x: [4, 5]}
    assert [point.step for point in store.loop_metrics.new_values("a", {}, limit=2)[x]] == [4, 5]


def test_a_follower_wakes_when_values_of_its_run_are_committed(store: Store) -> None:
    for run in ("a", "b"):
        add_run(store, run)

    async def follow() -> bool:
        with store.run_changes.follow(["a"]) as follower, store.run_changes.follow() as every:
            threading.Thread(target=store.loop_metrics.log, args=("b", "ada", 1, {"x": 1.0}, 1.0)).start()
            await every.changed()
            waiting = asyncio.ensure_future(follower.changed())
            await asyncio.sleep(0)
            of_others = waiting.done()
            threading.Thread(target=store.loop_metrics.log, args=("a", "ada", 1, {"x": 1.0}, 1.0)).start()
            await waiting
            return of_others

    assert asyncio.run(follow()) is False


def test_metrics_are_deleted_with_their_run_and_no_longer_counted(store: Store) -> None:
    for run in ("a", "b"):
        add_run(store, run)
        for step in range(300):
            store.loop_metrics.log(run, "ada", step, {"x": 1.0}, 1.0)
    assert store.loop_metrics.prune() == 0
    half = store.disk_usage.of("ada")["metrics"] // 2
    store.runs.set_status("a", RunStatus.RELEASED)
    assert store.runs.prune(seen_before=1.0) == 1
    while store.loop_metrics.prune():
        pass
    assert store.loop_metrics.names("a") == []
    assert len(values(store, "b", "x", MetricSource.LOGGED)) == 300
    assert store.disk_usage.of("ada")["metrics"] == half


def test_metrics_can_be_read_while_the_directory_is_in_use(store: Store) -> None:
    add_run(store, "a")
    store.loop_metrics.log("a", "ada", 1, {"x": 1.0}, 1.0)
    with open_reader(store.root) as reader:
        assert MetricReader(reader).names("a") == [MetricKey("x", MetricSource.LOGGED)]
