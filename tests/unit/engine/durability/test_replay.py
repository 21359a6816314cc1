"""Engines that stop and start again on the same data, compared with one that never stopped."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.engine.api.test_custom_losses import definition
from tests.unit.engine.test_engine import OWNER, Caller, config, forward_backward, optim_step, sample
from tinkex._wire import proto as wire_proto
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.engine.lanes.in_process import LocalBackend
from tinkex.engine.store import FutureStatus
from tinkex.errors import Expired, InvalidInput, StorageUnavailable
from tinkex.types import (
    CreateCustomLossRequest,
    CreateModelRequest,
    Datum,
    ForwardBackwardRequest,
    LoadWeightsRequest,
    LoraConfig,
    ModelInput,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    UnloadModelRequest,
)
from tinkex.types.plain import from_plain

pytestmark = pytest.mark.slow


@contextmanager
def running(home: Path, model: Path, **settings: Any) -> Iterator[Caller]:
    engine = Engine(config(home, model, **settings))
    engine.start()
    try:
        yield Caller(engine)
    finally:
        engine.close()


def data(seed: int, length: int = 9) -> list[Datum]:
    tokens = np.random.default_rng(seed).integers(5, 200, length + 1).tolist()
    return [Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]


def train(ada: Caller, run: str, numbers: range) -> None:
    """Odd numbers are passes, even ones steps."""
    for n in numbers:
        ada.run(forward_backward(run, n, data=data(n)) if n % 2 else optim_step(run, n))


def logprobs(ada: Caller, run: str, seq_id: int) -> bytes:
    output = ada.run(forward_backward(run, seq_id, forward_only=True, data=data(99)))
    return bytes(output.loss_fn_outputs[0]["logprobs"].to_numpy().tobytes())


def state_of(ada: Caller, run: str, seq_id: int) -> tuple[bytes, ...]:
    """The exact weights, moments and gradient of a run that is in memory."""
    logprobs(ada, run, seq_id)  # brings it into memory
    backend = ada.engine.backend
    assert isinstance(backend, LocalBackend)
    state = backend.state(run)
    buffers = (state.adapter.params, state.grad, state.exp_avg, state.exp_avg_sq)
    return (
        str(state.step).encode(),
        *(b"" if b is None else bytes(b.numpy().tobytes()) for b in buffers),
    )


@pytest.mark.parametrize("every", [1000, 3, 1])
def test_a_run_continues_after_every_stop_as_if_there_had_been_none(
    tiny_model: Path, tmp_path: Path, every: int
) -> None:
    with running(tmp_path / "undisturbed", tiny_model) as ada:
        run = ada.create()
        train(ada, run, range(1, 10))
        expected = state_of(ada, run, 10)
    settings = {"savepoint_after_operations": every}
    home = tmp_path / "stopped"
    with running(home, tiny_model, **settings) as ada:
        assert ada.create() == run
    for numbers in (range(1, 2), range(2, 4), range(4, 9), range(9, 10)):
        with running(home, tiny_model, **settings) as ada:
            train(ada, run, numbers)
    with running(home, tiny_model, **settings) as ada:
        assert state_of(ada, run, 10) == expected


def test_a_seed_that_was_drawn_is_drawn_once(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model) as ada:
        run = ada.create(seed=None)
        before = state_of(ada, run, 1)
    with running(tmp_path, tiny_model) as ada:
        assert state_of(ada, run, 2) == before


@pytest.mark.slow
@pytest.mark.parametrize("every", [1000, 7])
def test_runs_that_shared_a_pass_share_it_again(tiny_model: Path, tmp_path: Path, every: int) -> None:
    settings = {"savepoint_after_operations": every}
    with running(tmp_path, tiny_model, **settings) as ada:
        runs = [ada.create(n, seed=n) for n in range(3)]
        ids = []
        with ada.engine.paused():  # so that everything is queued before anything runs
            for n in range(1, 9):
                for k, run in enumerate(runs):
                    made = forward_backward(run, n, data=data(n, 5 + k)) if n % 2 else optim_step(run, n)
                    ids.append(ada.submit(made))
        for request_id in ids:
            assert not ada.outcome(request_id).error
        if every == 1000:
            assert max(len(turn) for turn in turns(ada)) == 3
        ada.run(UnloadModelRequest(model_id=runs[2]))
        ada.run(forward_backward(runs[0], 9, data=data(9)))
        expected = [state_of(ada, run, 10 - k) for k, run in enumerate(runs[:2])]
    with running(tmp_path, tiny_model, **settings) as ada:
        assert [state_of(ada, run, 11 - k) for k, run in enumerate(runs[:2])] == expected
        with pytest.raises(Expired):
            ada.submit(optim_step(runs[2], 10))


def group(seed: int, answers: int) -> list[Datum]:
    """A prompt that every seed has, and answers to it."""
    prompt = np.random.default_rng(0).integers(5, 200, 20).tolist()
    answer = np.random.default_rng(seed)
    sequences = [[*prompt, *answer.integers(5, 200, length).tolist()] for length in range(4, 4 + answers)]
    return [Datum(ModelInput.from_ints(s[:-1]), {"target_tokens": s[1:]}) for s in sequences]


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_a_replay_shares_the_prefixes_that_were_shared_whatever_the_setting_is_now(
    tiny_model: Path, tmp_path: Path, shared: bool
) -> None:
    with running(tmp_path, tiny_model, prefix_sharing=shared) as ada:
        runs = [ada.create(n, seed=n) for n in range(2)]
        with ada.engine.paused():  # so that chunks and runs share turns
            ids = [
                ada.submit(forward_backward(run, n, data=group(n, 3)) if n % 3 else optim_step(run, n))
                for n in range(1, 7)
                for run in runs
            ]
        for request_id in ids:
            assert not ada.outcome(request_id).error
        entries = [entry for turn in turns(ada) for entry in turn if entry.seq_id % 3]
        assert {entry.prefix_sharing for entry in entries if entry.seq_id > 0} == {shared}
        ada.run(forward_backward(runs[0], 7, data=group(7, 2)))
        expected = [state_of(ada, run, 8 - k) for k, run in enumerate(runs)]
    with running(tmp_path, tiny_model, prefix_sharing=not shared) as ada:
        assert [state_of(ada, run, 9 - k) for k, run in enumerate(runs)] == expected


def turns(ada: Caller) -> list[list[Any]]:
    entries = ada.engine.store.journal.turns(ada.engine.store.journal.runs())
    return [[e for e in entries if e.turn == turn] for turn in {e.turn for e in entries}]


def test_savepoints_prune_the_journal_and_replace_each_other(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model, savepoint_after_operations=2) as ada:
        run = ada.create()
        train(ada, run, range(1, 21))
        engine = ada.engine
        engine.flush_savepoints()
        assert len(turns(ada)) <= 4
        assert len(engine.store.journal.pending(run)) == 0
        (savepoint,) = engine.store.savepoints.all()
        assert savepoint.next_seq > 16
        assert [p.name for p in (engine.store.root / "savepoints").iterdir()] == [Path(savepoint.file).name]
        ada.run(UnloadModelRequest(model_id=run))
        engine.run_retention()
        assert engine.store.savepoints.all() == []
        assert not engine.store.journal.runs()
        assert list((engine.store.root / "savepoints").iterdir()) == []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
def test_a_corrupt_savepoint_ends_its_run_alone_and_names_the_last_checkpoint(
    tiny_model: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    with running(tmp_path, tiny_model, savepoint_after_operations=1) as ada:
        runs = [ada.create(n) for n in range(2)]
        for run in runs:
            train(ada, run, range(1, 5))
        path = ada.run(SaveWeightsRequest(model_id=runs[0], seq_id=5, path="good"))["path"]
        engine = ada.engine
        expected = state_of(ada, runs[1], 5)
        engine.flush_savepoints()
        savepoint = engine.store.savepoints.get(runs[0])
        assert savepoint is not None
        waiting = ada.submit(optim_step(runs[0], 7))
    damage(tmp_path / "engine" / savepoint.file)
    with running(tmp_path, tiny_model) as ada:
        if damage is flip_a_bit:  # found when the run is needed
            missing = ada.submit(optim_step(runs[0], 6))
            assert path in ada.outcome(missing).error
        outcome = ada.outcome(waiting)
        assert outcome.category == "server"
        assert "corrupt" in outcome.error
        assert path in outcome.error
        with pytest.raises(Expired, match=path):
            ada.submit(optim_step(runs[0], 8))
        row = ada.engine.store.runs.get(runs[0])
        assert row is not None
        assert row.status == "corrupted"
        assert state_of(ada, runs[1], 6) == expected
        resumed = ada.run(LoadWeightsRequest(session_id="s", model_seq_id=9, path=path, optimizer=True))
        ada.run(forward_backward(resumed["model_id"], 1))


def test_a_corrupt_journal_ends_its_run_alone(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model) as ada:
        runs = [ada.create(n) for n in range(2)]
        for run in runs:
            train(ada, run, range(1, 4))
        expected = state_of(ada, runs[1], 4)
    with sqlite3.connect(tmp_path / "engine" / "engine.db") as database:
        database.execute("UPDATE journal SET body = x'00' WHERE run_id = ? AND seq_id = 3", (runs[0],))
    database.close()
    with running(tmp_path, tiny_model) as ada:
        outcome = ada.outcome(ada.submit(optim_step(runs[0], 4)))
        assert "corrupt" in outcome.error
        assert "No checkpoint" in outcome.error
        with pytest.raises(Expired, match="corrupt"):
            ada.submit(optim_step(runs[0], 5))
        assert state_of(ada, runs[1], 5) == expected


def test_runs_that_shared_passes_with_a_corrupt_run_continue(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model) as ada:
        runs = [ada.create(n, seed=n) for n in range(2)]
        ids = []
        with ada.engine.paused():
            for n in range(1, 5):
                ids += [
                    ada.submit(forward_backward(run, n, data=data(n)) if n % 2 else optim_step(run, n))
                    for run in runs
                ]
        for request_id in ids:
            ada.outcome(request_id)
        expected = np.frombuffer(logprobs(ada, runs[1], 5), np.float32)
        assert ada.engine.store.journal.runs_sharing_turns([runs[0]]) == set(runs)
    with sqlite3.connect(tmp_path / "engine" / "engine.db") as database:
        database.execute("DELETE FROM journal WHERE run_id = ? AND seq_id = 3", (runs[0],))
    database.close()
    with running(tmp_path, tiny_model) as ada:
        again = np.frombuffer(logprobs(ada, runs[1], 6), np.float32)
        np.testing.assert_allclose(again, expected, atol=1e-5)
        row = ada.engine.store.runs.get(runs[0])
        assert row is not None
        assert row.status == "corrupted"


def test_saves_happen_once(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model) as ada:
        run = ada.create()
        train(ada, run, range(1, 3))
        ada.run(SaveWeightsRequest(model_id=run, seq_id=3, path="a"))
        ada.run(SaveWeightsForSamplerRequest(model_id=run, seq_id=4, path="b"))
        ada.run(SaveWeightsForSamplerRequest(model_id=run, seq_id=5, sampling_session_seq_id=0))
        late = ada.submit(SaveWeightsRequest(model_id=run, seq_id=7, path="late"))
        # What a save leaves that was interrupted before it was recorded.
        litter = tmp_path / "engine" / "checkpoints" / run.replace(":", "~") / "weights" / "late"
        litter.mkdir()
        listed = {row.path: row for row in ada.engine.store.checkpoints.of_run(run, time.time())}
    with running(tmp_path, tiny_model) as ada:
        train(ada, run, range(6, 7))
        assert not ada.outcome(late).error
        again = {row.path: row for row in ada.engine.store.checkpoints.of_run(run, time.time())}
        assert {path: again[path] for path in listed} == listed
        assert set(again) - set(listed) == {f"tinker://{run}/weights/late"}
        assert len(ada.engine.store.samplers.of_session("s")) == 1
        assert (litter / "adapter_config.json").is_file()


def test_a_loaded_checkpoint_may_go_before_the_restart(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model) as ada:
        source = ada.create(0, seed=5)
        train(ada, source, range(1, 5))
        path = ada.run(SaveWeightsRequest(model_id=source, seq_id=5, path="brief"))["path"]
        run = ada.create(1, seed=6)
        train(ada, run, range(1, 3))
        ada.run(LoadWeightsRequest(model_id=run, seq_id=3, path=path, optimizer=True))
        ada.run(forward_backward(run, 4, data=data(1)))
        made = ada.run(LoadWeightsRequest(session_id="s", model_seq_id=2, path=path))["model_id"]
        expected = [state_of(ada, run, 5), state_of(ada, made, 1)]
        (row,) = ada.engine.store.checkpoints.of_run(source, time.time())
        ada.engine.delete_checkpoint(row)
    with running(tmp_path, tiny_model) as ada:
        assert [state_of(ada, run, 6), state_of(ada, made, 2)] == expected


@pytest.mark.slow
def test_numbers_that_were_rejected_stay_used(tiny_model: Path, tmp_path: Path) -> None:
    wrong = [Datum(ModelInput.from_ints([5, 10**6]), {"target_tokens": [6, 7]})]
    with running(tmp_path, tiny_model) as ada:
        run = ada.create()
        with pytest.raises(InvalidInput):
            ada.submit(forward_backward(run, 2, data=wrong))
        waiting = ada.submit(optim_step(run, 3))
    with running(tmp_path, tiny_model) as ada:
        ada.run(forward_backward(run, 1))
        assert not ada.outcome(waiting).error
        with pytest.raises(InvalidInput, match="used up"):
            ada.submit(optim_step(run, 2))


@pytest.mark.slow
def test_operations_that_gave_up_waiting_are_not_run_after_a_restart(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running(tmp_path, tiny_model, gap_timeout_s=0.2) as ada:
        run = ada.create()
        assert "waited" in ada.outcome(ada.submit(optim_step(run, 3))).error
    with running(tmp_path, tiny_model) as ada:
        assert ada.run(optim_step(run, 4))["metrics"]["step:unique"] == 1


def test_a_creation_that_was_accepted_happens(tiny_model: Path, tmp_path: Path) -> None:
    engine = Engine(config(tmp_path, tiny_model))
    ada = Caller(engine)
    create = CreateModelRequest(
        session_id="s", model_seq_id=0, base_model="tiny", lora_config=LoraConfig(rank=2)
    )
    submitted = engine.submit(OWNER, create)
    assert submitted.model_id is not None
    step = ada.submit(forward_backward(submitted.model_id, 1))
    engine.close()  # never started
    with running(tmp_path, tiny_model) as ada:
        assert not ada.outcome(submitted.request_id).error
        assert wire_proto.decode_forward_backward_output(ada.outcome(step).result).metrics["loss:sum"] > 0


def test_a_run_of_a_model_that_is_not_served_waits_for_it(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model) as ada:
        run = ada.create()
        waiting = ada.submit(optim_step(run, 2))
    engine = Engine(EngineConfig(home=tmp_path, models={"other": str(tmp_path)}))
    engine.start()
    engine.close()
    with running(tmp_path, tiny_model) as ada:
        ada.run(forward_backward(run, 1))
        assert b'"step:unique":1' in ada.outcome(waiting).result


@contextmanager
def full_disk(engine: Engine) -> Iterator[None]:
    """The database may not grow by a page: SQLite then fails exactly as on a full disk."""
    engine.store.database.all("PRAGMA max_page_count = 1")
    try:
        yield
    finally:
        engine.store.database.all("PRAGMA max_page_count = 1000000000")


@contextmanager
def locked(engine: Engine) -> Iterator[None]:
    other = sqlite3.connect(engine.store.database.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


@pytest.mark.slow
@pytest.mark.parametrize("trouble", [full_disk, locked])
def test_what_cannot_be_recorded_is_rejected_and_can_be_sent_again(
    tiny_model: Path, tmp_path: Path, trouble: Any
) -> None:
    with running(tmp_path, tiny_model) as ada:
        run = ada.create()
        large = forward_backward(run, 1, data=data(1, 60) * 200)
        with trouble(ada.engine):
            with pytest.raises(StorageUnavailable, match="nothing was changed"):
                ada.submit(large)
            assert ada.engine.health.status.startswith("degraded: operations cannot be recorded")
        assert ada.engine.store.futures.find_by_seq_id(run, 1) is None
        ada.run(large)
        assert ada.engine.health.status == "ok"


@pytest.mark.slow
def test_results_that_cannot_be_recorded_are_returned_once_they_are(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model) as ada:
        sampler = ada.sampler(base_model="tiny")
        with ExitStack() as paused:
            paused.enter_context(ada.engine.paused())
            long = ada.submit(sample(sampler, 0, prompt=ModelInput.from_ints([5] * 200)))
            with locked(ada.engine):
                paused.close()
                assert asyncio.run(ada.engine.wait(OWNER, long, 1.5)) is None
        assert ada.outcome(long).status is FutureStatus.DONE


def test_a_pass_with_an_uploaded_loss_is_repeated_after_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    def uploaded(run: str, seq_id: int, loss_id: str) -> ForwardBackwardRequest:
        inputs = {**data(seq_id)[0].loss_fn_inputs, "weights": [0.5] * 9}
        datum = Datum(data(seq_id)[0].model_input, inputs)
        return ForwardBackwardRequest(run, seq_id, [datum], "custom", {"loss_id": loss_id})

    with running(tmp_path, tiny_model) as ada:
        run = ada.create()
        session = run.partition(":")[0]
        request = from_plain(definition(session), CreateCustomLossRequest)
        reported = ada.outcome(ada.engine.submit(OWNER, request).request_id)
        loss_id = json.loads(reported.result)["loss_id"]
        ada.run(uploaded(run, 1, loss_id))
        ada.run(optim_step(run, 2))
        expected = state_of(ada, run, 3)
    with running(tmp_path, tiny_model) as ada:
        assert state_of(ada, run, 4) == expected
        ada.run(uploaded(run, 5, loss_id))
        assert ada.engine.submit(OWNER, request).request_id == ada.engine.submit(OWNER, request).request_id
