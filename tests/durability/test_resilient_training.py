"""Resilient training while its server, its run and its own program are killed: the weights of an undisturbed run."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import tinkex
from tests.durability.killable import MODEL, KillableServer
from tinkex import types
from tinkex.observability.events import Event, RunRecovered
from tinkex.recovery import RecoveryMonitor, RecoveryPolicy, RecoveryResult, ResilientTraining, TrainingStep

STEPS = 10
EVERY = 3
POLICY = RecoveryPolicy(backoff_s=0.1, max_backoff_s=0.5, max_attempts=50)


def batch(position: int) -> list[types.Datum]:
    tokens = np.random.default_rng(position).integers(5, 200, 13).tolist()
    return [types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]


class Recoveries:
    """Counts recoveries."""

    def __init__(self) -> None:
        self.seen: list[RunRecovered] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, RunRecovered):
            self.seen.append(event)


def loop_on(
    service: tinkex.ServiceClient, name: str, sink: Recoveries
) -> ResilientTraining[list[types.Datum]]:
    return tinkex.resilient_training(
        service,
        batch,
        steps=STEPS,
        name=name,
        base_model=MODEL,
        rank=4,
        seed=7,
        checkpoint_every=EVERY,
        policy=POLICY,
        events=sink,
    )


def apply(step: TrainingStep[list[types.Datum]], history: dict[str, list[int]]) -> None:
    """One step, awaited; ``history`` holds the batches of each run."""
    passed = step.training.forward_backward(step.batch, "cross_entropy")
    stepped = step.training.optim_step(types.AdamParams(learning_rate=1e-2))
    passed.result(timeout=90)
    stepped.result(timeout=90)
    history.setdefault(step.training.model_id, []).append(step.index)


@dataclass(frozen=True)
class End:
    """The result of a training: the run's logprobs of one text, and a sampler's of another."""

    trained: bytes
    sampled: list[float]

    def is_like(self, other: End) -> bool:
        """Bitwise for the run; a sampler with a cold cache sums in another order."""
        return self.trained == other.trained and np.allclose(self.sampled, other.sampled, rtol=0, atol=1e-5)


def end_of(loop: ResilientTraining[list[types.Datum]]) -> End:
    output = loop.training.forward(batch(999), "cross_entropy").result(timeout=90)
    sampler = loop.training.save_weights_and_get_sampling_client()
    scored = sampler.compute_logprobs(batch(998)[0].model_input).result(timeout=90)
    trained = output.loss_fn_outputs[0]["logprobs"].to_numpy().tobytes()
    return End(trained, [one for one in scored[1:] if one is not None])


def program(
    server: KillableServer, name: str, disturb: Callable[[int], None]
) -> tuple[End, dict[str, list[int]], list[RunRecovered]]:
    sink, history = Recoveries(), {}
    with tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service:
        loop = loop_on(service, name, sink)
        for step in loop:
            with step:
                apply(step, history)
                disturb(step.index)
        assert loop.position == STEPS
        assert loop.recoveries == len(sink.seen)
        return end_of(loop), history, sink.seen


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableServer]:
    with KillableServer(tmp_path_factory.mktemp("resilient"), tiny_model, often=2) as running:
        yield running


@pytest.fixture(scope="module")
def quiet(server: KillableServer) -> End:
    """The result of an undisturbed training."""
    end, history, recovered = program(server, "quiet", lambda _: None)
    assert list(history.values()) == [list(range(STEPS))]
    assert not recovered
    return end


def once(at: int, deed: Callable[[], None]) -> Callable[[int], None]:
    done = []

    def disturb(index: int) -> None:
        if index == at and not done:
            done.append(index)
            deed()

    return disturb


@pytest.mark.slow
def test_a_killed_server_is_a_delay(server: KillableServer, quiet: End) -> None:
    end, history, recovered = program(server, "killed", once(4, server.restart))
    assert end.is_like(quiet)
    assert list(history.values()) == [list(range(STEPS))]  # the same run, each batch once
    assert not recovered


def destroy(server: KillableServer) -> None:
    """Kills the server and deletes its savepoints and journal."""
    server.kill()
    for file in (server.home / "engine" / "savepoints").rglob("*"):
        if file.is_file():
            file.unlink()
    server.start()
    server.wait()


@pytest.mark.slow
def test_a_lost_run_resumes_from_its_checkpoint(server: KillableServer, quiet: End) -> None:
    end, history, recovered = program(server, "lost", once(7, lambda: destroy(server)))
    assert end.is_like(quiet)
    first, second = history.values()
    assert first == [*range(8)]
    assert second == [*range(6, STEPS)]  # from the checkpoint after six batches: none repeated, none skipped
    assert [event.checkpoint.rpartition("-")[2] for event in recovered] == ["00000006"]


def forget_sessions(server: KillableServer) -> None:
    """Kills the server and deletes its runs and sessions; the checkpoints stay."""
    server.kill()
    savepoints = server.home / "engine" / "savepoints"
    for file in savepoints.rglob("*"):
        if file.is_file():
            file.unlink()
    with contextlib.closing(sqlite3.connect(server.home / "engine" / "engine.db")) as database, database:
        database.execute("PRAGMA foreign_keys = OFF")
        database.execute("DELETE FROM sessions")
    server.start()
    server.wait()


@pytest.mark.slow
def test_a_lost_session_is_replaced_and_the_training_resumes_from_its_checkpoint(
    server: KillableServer, quiet: End
) -> None:
    end, history, recovered = program(server, "forgotten", once(7, lambda: forget_sessions(server)))
    assert end.is_like(quiet)
    (one, first), (other, second) = history.items()
    assert one.partition(":")[0] != other.partition(":")[0], "another session"
    assert first == [*range(8)]
    assert second == [*range(6, STEPS)]
    assert [event.checkpoint.rpartition("-")[2] for event in recovered] == ["00000006"]


def start_afresh(server: KillableServer) -> None:
    """Kills the server and starts it on an empty data directory, with the same key."""
    key = server.key
    server.kill()
    shutil.rmtree(server.home / "engine")
    (server.home / "engine").mkdir()
    (server.home / "engine" / "api_key").write_text(f"{key}\n")
    server.start()
    server.wait()


@pytest.mark.slow
def test_a_server_that_lost_its_data_raises_an_error_that_says_what_to_do(server: KillableServer) -> None:
    with pytest.raises(
        tinkex.RecoveryError, match=r"no longer has a checkpoint of the training 'gone'.*resume='never'"
    ):
        program(server, "gone", once(4, lambda: start_afresh(server)))


@pytest.mark.slow
def test_a_monitor_finds_a_corrupted_run_and_restarts_it_with_its_optimizer(server: KillableServer) -> None:
    recoveries: queue.Queue[RecoveryResult] = queue.Queue()
    policy = replace(POLICY, poll_interval_s=0.2, on_recovery=recoveries.put)
    with (
        tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service,
        RecoveryMonitor(service, policy) as monitor,
    ):
        training = service.create_lora_training_client(MODEL, rank=4, seed=7)
        monitor.watch(training)
        for n in range(3):
            training.forward_backward(batch(n), "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=1e-2))
        path = training.save_state("third").result(timeout=90).path
        training.forward_backward(batch(3), "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=90)
        expected = training.forward(batch(9), "cross_entropy").result(timeout=90)
        destroy(server)
        recovered = recoveries.get(timeout=90)
        assert (recovered.run_id, recovered.condition) == (training.model_id, "corrupted")
        assert recovered.checkpoint == path
        again = recovered.training
        again.forward_backward(batch(3), "cross_entropy")
        again.optim_step(types.AdamParams(learning_rate=1e-2))
        output = again.forward(batch(9), "cross_entropy").result(timeout=90)
        np.testing.assert_array_equal(
            output.loss_fn_outputs[0]["logprobs"].to_numpy(),
            expected.loss_fn_outputs[0]["logprobs"].to_numpy(),
        )


PROGRAM = """
import sys
import tinkex
from tests.durability.test_resilient_training import Recoveries, apply, loop_on

url, key, name = sys.argv[1:]
with tinkex.ServiceClient(base_url=url, api_key=key) as service:
    loop = loop_on(service, name, Recoveries())
    for step in loop:
        with step:
            apply(step, {})
            print(step.index, flush=True)
"""


def started(server: KillableServer, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, server.url, server.key, name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def follow(process: subprocess.Popen[str], until: int) -> list[int]:
    """Reads the steps a program prints, up to one of them."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(int(line))
        if seen[-1] == until:
            break
    return seen


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, error = process.communicate(timeout=90)
    return process.returncode, error


def resumed(server: KillableServer, name: str) -> tuple[End, int | None, list[int]]:
    history: dict[str, list[int]] = {}
    with tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service:
        loop = loop_on(service, name, Recoveries())
        for step in loop:
            with step:
                apply(step, history)
        steps = [index for indices in history.values() for index in indices]
        return end_of(loop), loop.resumed_at, steps


@pytest.mark.slow
def test_a_killed_program_resumes_when_it_is_restarted(server: KillableServer, quiet: End) -> None:
    process = started(server, "crashed")
    assert follow(process, until=7) == [*range(8)]
    process.kill()
    ended(process)
    end, at, steps = resumed(server, "crashed")
    assert at == 6
    assert steps == [*range(6, STEPS)]
    assert end.is_like(quiet)
    # Once more: nothing is left to do, and the weights are there.
    end, at, steps = resumed(server, "crashed")
    assert (at, steps) == (STEPS, [])
    assert end.is_like(quiet)


@pytest.mark.slow
def test_program_and_server_may_be_killed_together(server: KillableServer, quiet: End) -> None:
    process = started(server, "both")
    follow(process, until=4)
    server.kill()
    process.kill()
    ended(process)
    server.start()
    server.wait()
    end, at, steps = resumed(server, "both")
    assert at == 3
    assert steps == [*range(3, STEPS)]
    assert end.is_like(quiet)


@pytest.mark.slow
def test_an_interrupt_finishes_the_step_and_saves_it(server: KillableServer, quiet: End) -> None:
    process = started(server, "interrupted")
    (*_, last) = follow(process, until=4)
    process.send_signal(signal.SIGINT)
    code, error = ended(process)
    assert code != 0
    assert "finishing this step and saving a checkpoint" in error or "KeyboardInterrupt" in error
    end, at, steps = resumed(server, "interrupted")
    assert at is not None
    assert at >= last - 1  # at worst the interrupt came between two steps
    assert steps == [*range(at, STEPS)]
    assert end.is_like(quiet)
