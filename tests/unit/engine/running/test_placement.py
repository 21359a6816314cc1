from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import pytest

from tinkex.engine.running.placement import Placement
from tinkex.engine.store import Store

LANES = ["t0", "t1"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store(tmp_path_factory.mktemp("placement") / "engine") as opened:
        yield opened


def test_runs_go_to_the_trainer_with_fewer_busy_ones(store: Store) -> None:
    busy = {"a"}
    placement = Placement(store, LANES, lambda: busy)
    placement.place(["a", "b", "c", "d"], LANES)
    assert placement.runs_on("t0") == {"a"}
    assert placement.runs_on("t1") == {"b", "c", "d"}
    busy.update("cd")
    placement.place(["e"], LANES)
    assert placement.lane_of("e") == "t0"


def test_a_run_that_has_ended_counts_no_more(store: Store) -> None:
    placement = Placement(store, LANES, frozenset)
    placement.place(["a", "b"], LANES)
    placement.forget("a")
    placement.forget("unknown")
    assert not placement.runs_on("t0")
    placement.place(["c"], LANES)
    assert placement.runs_on("t0") == {"c"}


def test_the_runs_of_a_lost_trainer_are_placed_again_except_interrupted_ones(store: Store) -> None:
    placement = Placement(store, LANES, frozenset)
    placement.place(["a", "b", "c", "d"], LANES)
    assert placement.runs_on("t0") == {"a", "c"}
    placement.release("t0", keep={"c"})
    placement.place(["a", "c"], ["t1"])
    assert placement.runs_on("t0") == {"c"}
    assert placement.runs_on("t1") == {"a", "b", "d"}


def test_runs_that_cannot_be_placed_are_placed_the_next_time(store: Store) -> None:
    times = iter(range(2))

    def unfinished() -> AbstractSet[str]:
        if next(times) == 0:
            raise sqlite3.OperationalError("disk I/O error")
        return frozenset()

    placement = Placement(store, LANES, unfinished)
    with pytest.raises(sqlite3.OperationalError):
        placement.place(["a"], LANES)
    placement.place([], LANES)
    assert placement.runs_on("t0") == {"a"}
    placement.place([], LANES)  # nothing is looked up any more
