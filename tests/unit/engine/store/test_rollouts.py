from __future__ import annotations

from pathlib import Path

import pytest

from tinkex.engine.store import RolloutContent, RolloutRow, RunRow, RunStatus, SessionRow, Store


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "engine") as opened:
        for owner, run_id in (("ada", "a"), ("ada", "b"), ("bob", "c")):
            session = f"session-of-{owner}"
            if opened.sessions.get(session) is None:
                opened.sessions.add(SessionRow(session_id=session, owner=owner, created_at=0.0, seen_at=0.0))
            opened.runs.add(RunRow(run_id, session, owner, "tiny", 0.0, 0.0, RunStatus.LIVE))
        yield opened


def rollout(
    step: int, place: int, reward: float | None, run_id: str = "a", num_tokens: int = 4
) -> RolloutRow:
    content = RolloutContent(
        group=f"g{place // 2}",
        prompt="2 + 2 =",
        text=" 4",
        prompt_tokens=(1, 2, 3),
        tokens=tuple(range(num_tokens)),
        logprobs=tuple(-0.5 for _ in range(num_tokens)),
        advantages=tuple(0.25 for _ in range(num_tokens)),
        metrics={"reward/format": 1.0},
    )
    return RolloutRow(run_id, step, place, float(step), reward, reward, content)


def add(store: Store, *rollouts: RolloutRow, per_run: int = 2**20, per_user: int = 2**20) -> None:
    store.rollouts.add(rollouts, "ada", max_bytes_per_run=per_run, max_bytes_per_user=per_user)


def test_rollouts_are_read_as_they_were_reported(store: Store) -> None:
    rows = [rollout(1, place, float(place)) for place in range(3)]
    add(store, *rows)
    assert store.rollouts.of_step("a", 1) == rows
    assert store.rollouts.of_step("a", 1, limit=1, offset=2) == rows[2:]
    assert store.rollouts.of_step("a", 2) == []


def test_a_report_that_is_repeated_counts_once(store: Store) -> None:
    add(store, rollout(1, 0, 0.5))
    before = store.disk_usage.of("ada")["rollouts"]
    add(store, rollout(1, 0, 0.5))
    assert store.disk_usage.of("ada")["rollouts"] == before
    assert [step.num_rollouts for step in store.rollouts.steps("a")] == [1]


def test_steps_have_the_range_of_their_rewards(store: Store) -> None:
    add(store, *(rollout(step, place, float(place * step)) for step in (1, 2) for place in range(3)))
    add(store, rollout(3, 0, None))
    first, second, third = store.rollouts.steps("a")
    assert (first.step, first.num_rollouts, first.num_tokens) == (1, 3, 12)
    assert (second.min_reward, second.mean_reward, second.max_reward) == (0.0, 2.0, 4.0)
    assert (third.mean_reward, third.max_reward) == (None, None)
    assert [step.step for step in store.rollouts.steps("a", start=2, limit=1)] == [2]


def test_rewards_are_counted_by_step_and_bin(store: Store) -> None:
    assert store.rollouts.histogram("a") is None
    add(
        store,
        rollout(1, 0, 0.0),
        rollout(1, 1, 1.0),
        rollout(2, 0, 1.0),
        rollout(2, 1, 1.0),
        rollout(3, 0, None),
    )
    histogram = store.rollouts.histogram("a", num_bins=2)
    assert histogram is not None
    assert histogram.edges == [0.0, 0.5, 1.0]
    assert histogram.steps == [1, 2]
    assert histogram.counts == [[1, 1], [0, 2]]
    together = store.rollouts.histogram("a", num_bins=2, max_steps=1)
    assert together is not None
    assert (together.steps, together.counts) == ([1], [[1, 3]])


def test_the_oldest_steps_of_a_run_give_way_to_new_ones(store: Store) -> None:
    add(store, *(rollout(step, place, 0.0) for step in range(5) for place in range(2)))
    total = store.disk_usage.of("ada")["rollouts"]
    add(store, rollout(9, 0, 0.0), per_run=total // 2)
    assert [step.step for step in store.rollouts.steps("a")] == [3, 4, 9]
    assert store.disk_usage.of("ada")["rollouts"] <= total // 2


def test_the_oldest_rollouts_of_a_user_give_way_to_new_ones_of_another_run(store: Store) -> None:
    add(store, *(rollout(step, 0, 0.0) for step in range(4)))
    total = store.disk_usage.of("ada")["rollouts"]
    add(store, rollout(2, 0, 0.0, "b"), per_user=total)
    assert [step.step for step in store.rollouts.steps("a")] == [1, 2, 3]
    assert [step.step for step in store.rollouts.steps("b")] == [2]


def test_a_reader_sees_only_the_rollouts_of_its_owner(store: Store) -> None:
    add(store, rollout(1, 0, 1.0))
    rollouts = store.rollouts
    assert rollouts.steps("a", owner="bob") == []
    assert rollouts.of_step("a", 1, owner="bob") == []
    assert rollouts.histogram("a", owner="bob") is None
    assert len(rollouts.steps("a", owner="ada")) == 1


def test_rollouts_are_deleted_with_their_run(store: Store) -> None:
    add(store, *(rollout(1, place, 1.0, run) for place in range(2) for run in ("a", "b")))
    store.runs.set_status("a", RunStatus.RELEASED)
    assert store.runs.prune(seen_before=1.0) == 1
    while store.rollouts.prune():
        pass
    assert store.rollouts.steps("a") == []
    assert [step.num_rollouts for step in store.rollouts.steps("b")] == [2]
