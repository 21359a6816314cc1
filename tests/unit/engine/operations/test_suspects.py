from __future__ import annotations

from tinkex.engine.backend.seam import WorkerDied
from tinkex.engine.operations.suspects import Suspects, given_up

CRASH = WorkerDied("it was ended by SIGSEGV", own_fault=True)
KILL = WorkerDied("it was ended by SIGKILL from outside", own_fault=False)


def test_the_first_time_everything_runs_again_as_it_was() -> None:
    suspects = Suspects()
    suspects.died(["a", "b"], CRASH)
    assert not suspects.alone("a")
    assert not suspects.convicted("a")


def test_those_that_were_there_twice_run_alone_and_the_third_time_is_one_too_many() -> None:
    suspects = Suspects()
    for _ in range(2):
        suspects.died(["a", "b"], CRASH)
    assert suspects.alone("a")
    assert suspects.alone("b")
    assert not suspects.convicted("b")
    suspects.died(["b"], CRASH)
    assert suspects.convicted("b")
    assert not suspects.convicted("a")


def test_being_killed_from_outside_says_little() -> None:
    suspects = Suspects()
    for _ in range(5):
        suspects.died(["a"], KILL)
    assert not suspects.alone("a")
    for _ in range(4):
        suspects.died(["a"], KILL)
    assert suspects.convicted("a")


def test_no_run_is_lost_because_somebody_ends_processes() -> None:
    suspects = Suspects()
    for _ in range(100):
        assert not suspects.judge_replay({"run"}, KILL)
    assert not suspects.judge_replay({"run", "other"}, CRASH)
    assert not suspects.judge_replay({"run"}, CRASH)
    assert suspects.judge_replay({"run"}, CRASH) == ["run"]
    suspects.cleared(["run"])
    assert not suspects.judge_replay({"run"}, CRASH)


def test_an_outcome_clears() -> None:
    suspects = Suspects()
    for _ in range(3):
        suspects.died(["a"], CRASH)
    suspects.cleared(["a", "b"])
    assert not suspects.alone("a")


def test_what_it_fails_with_says_what_happened_and_what_to_do() -> None:
    assert "SIGSEGV" in str(given_up(CRASH))
    assert "send less at once" in str(given_up(CRASH))
