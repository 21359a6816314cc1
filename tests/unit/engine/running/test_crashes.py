from __future__ import annotations

from tinkex.engine.lanes.interface import WorkerLost
from tinkex.engine.running.crashes import CrashTracker, quarantined

CRASH = WorkerLost("it was terminated by SIGSEGV", own_fault=True)
KILL = WorkerLost("it was terminated by SIGKILL from outside", own_fault=False)


def test_the_first_time_everything_runs_again_as_it_was() -> None:
    crashes = CrashTracker()
    crashes.record_crash(["a", "b"], CRASH)
    assert not crashes.runs_alone("a")
    assert not crashes.is_quarantined("a")


def test_those_that_were_there_twice_run_alone_and_the_third_time_is_one_too_many() -> None:
    crashes = CrashTracker()
    for _ in range(2):
        crashes.record_crash(["a", "b"], CRASH)
    assert crashes.runs_alone("a")
    assert crashes.runs_alone("b")
    assert not crashes.is_quarantined("b")
    crashes.record_crash(["b"], CRASH)
    assert crashes.is_quarantined("b")
    assert not crashes.is_quarantined("a")


def test_being_killed_from_outside_says_little() -> None:
    crashes = CrashTracker()
    for _ in range(5):
        crashes.record_crash(["a"], KILL)
    assert not crashes.runs_alone("a")
    for _ in range(4):
        crashes.record_crash(["a"], KILL)
    assert crashes.is_quarantined("a")


def test_an_outcome_clears() -> None:
    crashes = CrashTracker()
    for _ in range(3):
        crashes.record_crash(["a"], CRASH)
    crashes.clear(["a", "b"])
    assert not crashes.runs_alone("a")


def test_what_it_fails_with_says_what_happened_and_what_to_do() -> None:
    assert "SIGSEGV" in str(quarantined(CRASH))
    assert "send less in one request" in str(quarantined(CRASH))
