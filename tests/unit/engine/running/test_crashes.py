from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.engine.lanes.crashing import PATIENCE_S, crashing_engine
from tests.unit.engine.running.test_suspended_passes import costly_pass, upload
from tests.unit.engine.test_engine import Caller, config, optim_step
from tinkex.engine.engine import Engine
from tinkex.engine.lanes.interface import WorkerLost
from tinkex.engine.operation import Kind, Operation
from tinkex.engine.running.crashes import LOSS_QUARANTINE_S, CrashTracker, quarantined
from tinkex.engine.scheduler import CrashBackoff
from tinkex.engine.store.crashes import Crashes
from tinkex.engine.store.database import Database
from tinkex.errors import InvalidInput, OverQuota

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


def operation(name: str, owner: str = "ada", run_id: str = "", loss: str | None = None) -> Operation:
    run_id = run_id or f"run-{name}"
    return Operation(name, owner, "tiny", run_id, 1, Kind.FORWARD_BACKWARD, 5, loss=loss, num_datums=1)


def test_an_operation_with_a_custom_loss_is_quarantined_after_two_crashes_and_so_is_its_loss() -> None:
    crashes = CrashTracker()
    turn = (operation("a", loss="digest"),)
    crashes.record_operations(turn, CRASH)
    assert crashes.turns_to_retry(turn, CRASH) == [turn]
    crashes.check_loss("digest")
    crashes.record_operations(turn, CRASH)
    assert crashes.turns_to_retry(turn, CRASH) == []
    with pytest.raises(
        InvalidInput, match=r"custom loss is quarantined.*SIGSEGV.*create a loss that computes"
    ):
        crashes.check_loss("digest")
    crashes.check_loss("another")
    crashes.check_loss(None)
    crashes.clear(["a"])  # the operation has its outcome; the loss stays where it is
    with pytest.raises(InvalidInput):
        crashes.check_loss("digest")


def test_kills_from_outside_quarantine_no_loss_and_delay_no_user() -> None:
    crashes = CrashTracker()
    turn = (operation("a", loss="digest"),)
    for _ in range(6):
        assert not crashes.record_operations(turn, KILL)
    assert crashes.turns_to_retry(turn, KILL) == []
    crashes.check_loss("digest")
    crashes.check_user("ada")
    assert crashes.delayed_users == set()


def test_after_a_crash_runs_with_a_custom_loss_run_alone_and_in_order_and_the_others_together_before_them() -> (
    None
):
    crashes = CrashTracker()
    plain, other = operation("plain"), operation("other", owner="bob")
    custom, later = operation("custom", run_id="r", loss="digest"), operation("later", run_id="r")
    turn = (custom, plain, later, other)
    crashes.record_operations(turn, CRASH)
    assert crashes.turns_to_retry(turn, CRASH) == [(plain, other), (custom,), (later,)]
    assert crashes.turns_to_retry(turn, KILL) == [turn]
    assert crashes.turns_to_retry((plain, other), CRASH) == [(plain, other)]


def test_a_user_whose_operations_crash_the_worker_waits_longer_each_time_and_others_do_not() -> None:
    now = [0.0]
    crashes = CrashTracker(CrashBackoff[str](clock=lambda: now[0]))
    waits = []
    for number in range(4):
        assert crashes.record_operations([operation(f"a{number}")], CRASH)
        with pytest.raises(OverQuota, match="have crashed the worker") as caught:
            crashes.check_user("ada")
        assert caught.value.retry_after_s is not None
        waits.append(caught.value.retry_after_s)
        assert crashes.delayed_users == {"ada"}
        assert crashes.next_deadline == now[0] + waits[-1]
        crashes.check_user("bob")
        now[0] += waits[-1]
        crashes.check_user("ada")
        assert crashes.next_deadline is None
    assert waits == sorted(set(waits))


def test_a_crash_of_operations_of_several_users_counts_against_none_of_them() -> None:
    crashes = CrashTracker()
    assert not crashes.record_operations([operation("a"), operation("b", owner="bob")], CRASH)
    assert crashes.delayed_users == set()


# Restarts.


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Crashes]:
    database = Database(tmp_path / "engine.db")
    yield Crashes(database)
    database.close()


def quarantine(crashes: CrashTracker, loss: str) -> None:
    turn = (operation(f"op-{loss}", loss=loss),)
    for _ in range(2):
        crashes.record_operations(turn, CRASH)
    assert crashes.turns_to_retry(turn, CRASH) == []


def test_a_quarantined_loss_stays_quarantined_after_a_restart_until_it_expires(records: Crashes) -> None:
    now = [1000.0]
    quarantine(CrashTracker(records=records, clock=lambda: now[0]), "digest")
    now[0] += LOSS_QUARANTINE_S - 1
    restarted = CrashTracker(records=records, clock=lambda: now[0])
    with pytest.raises(InvalidInput, match=r"quarantined.*SIGSEGV"):
        restarted.check_loss("digest")
    restarted.check_loss("another")
    now[0] += 2
    restarted.check_loss("digest")
    CrashTracker(records=records, clock=lambda: now[0]).check_loss("digest")
    quarantine(restarted, "another")
    assert {row.name for row in records.all(0.0)} == {"ada", "another"}, "what has expired is deleted"


def test_a_user_waits_for_the_rest_of_the_time_after_a_restart_and_longer_after_the_next_crash(
    records: Crashes,
) -> None:
    now = [1000.0]

    def restart() -> CrashTracker:
        users = CrashBackoff[str](clock=lambda: now[0] - 900)  # another clock, as that of another boot
        return CrashTracker(users, records, clock=lambda: now[0])

    crashes = restart()
    for number in range(4):
        crashes.record_operations([operation(f"a{number}")], CRASH)
    now[0] += 3
    restarted = restart()
    with pytest.raises(OverQuota, match="4 times") as caught:
        restarted.check_user("ada")
    assert caught.value.retry_after_s == 5.0
    restarted.check_user("bob")
    restarted.record_operations([operation("a")], CRASH)
    with pytest.raises(OverQuota, match="5 times") as caught:
        restarted.check_user("ada")
    assert caught.value.retry_after_s == 16.0
    now[0] += 3600
    restart().check_user("ada")
    assert not records.all(now[0])


def crash_and_die(home: Path, model: Path) -> None:
    """Has a loss quarantined, then kills this process."""
    engine, backend = crashing_engine(home, model)
    ada = Caller(engine)
    run, loss_id = ada.create(), upload(ada)
    backend.crashes = lambda call, runs: call == "pass" and run in runs
    assert "quarantined" in ada.outcome(ada.submit(costly_pass(run, 1, loss_id)), PATIENCE_S).error
    print(run, loss_id, flush=True)
    signal.raise_signal(signal.SIGKILL)


@pytest.mark.slow
def test_quarantined_losses_and_delays_survive_a_kill_of_the_server(tiny_model: Path, tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from tests.unit.engine.running.test_crashes import crash_and_die; "
    program += "crash_and_die(Path(sys.argv[1]), Path(sys.argv[2]))"
    command = [sys.executable, "-c", program, str(tmp_path), str(tiny_model)]
    killed = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL
    run, loss_id = killed.stdout.split()
    engine = Engine(config(tmp_path, tiny_model))
    engine.start()
    try:
        ada = Caller(engine)
        loaded = engine.load_models()
        (user,) = [row for row in engine.store.crashes.all(0.0) if row.name == ada.owner]
        assert user.num_crashes == 2
        loaded.result(PATIENCE_S)
        refused: Exception | None = None
        while not isinstance(refused, InvalidInput):  # first the user has to wait, then the loss is rejected
            with pytest.raises((OverQuota, InvalidInput)) as caught:
                ada.submit(costly_pass(run, 2, loss_id))
            refused = caught.value
        assert "quarantined" in str(refused)
        ada.run(optim_step(run, 3))
    finally:
        engine.close()
