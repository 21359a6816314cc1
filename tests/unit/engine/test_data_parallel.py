"""Passes cut over several trainers: the same bits for the same layout, and no trainer that is busy, slow or lost matters."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.engine.durability.test_replay import running, turns
from tests.unit.engine.lanes.test_ray_backend import Machines
from tests.unit.engine.test_engine import Caller, config, forward_backward, optim_step
from tinkex._wire import proto as wire_proto
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.engine.lanes.in_process import LocalBackend
from tinkex.engine.lanes.interface import PassJob, PassReport, ShardTask, WorkerLost
from tinkex.engine.lanes.ray_backend import RayBackend
from tinkex.engine.lanes.ray_cluster import Place
from tinkex.engine.lanes.remote import Callbacks
from tinkex.engine.lanes.roles import LaneSpec, Role
from tinkex.engine.lanes.worker_process import ProcessBackend
from tinkex.engine.model.adapter_copy import AdapterCopy
from tinkex.engine.trainer.shards import ShardResult
from tinkex.errors import SetupError
from tinkex.types import Datum, ForwardBackwardOutput, LoadWeightsRequest, ModelInput, SaveWeightsRequest

PATIENCE_S = 60.0
SHARD = 40
"""Distinct tokens of a shard."""
POOL = {"trainers": 2, "threads": 1, "data_parallel_tokens": SHARD}


def batch(seed: int, num_datums: int = 8) -> list[Datum]:
    """Two prompts, and datums that begin with neither: six trees of 200 distinct tokens."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(5, 200, 12).tolist() for _ in range(2)]
    data = []
    for number in range(num_datums):
        prompt = prompts[number % 2] if number < 4 else []
        tokens = [*prompt, *random.integers(5, 200, 20 + number).tolist()]
        data.append(Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]}))
    return data


class ObservedBackend(LocalBackend):
    """Counts what it computes; ``hold`` makes it wait in a shard until it is released, and ``fail`` raises there."""

    def __init__(self, engine_config: EngineConfig) -> None:
        super().__init__(engine_config)
        self.own_shards: list[int] = []
        self.helped: list[ShardTask] = []
        self.passes = 0
        self.kept: list[str] = []
        self.dropped: list[str] = []
        self.hold = False
        self.entered, self.release = threading.Event(), threading.Event()
        self.before_own = threading.Event()
        self.before_own.set()
        self.fail: Exception | None = None
        self.fail_own: Exception | None = None

    def run_pass(self, jobs: Sequence[PassJob], *, share_prefixes: bool) -> Sequence[PassReport] | None:
        self.passes += 1
        return super().run_pass(jobs, share_prefixes=share_prefixes)

    def compute_shard(self, number: int) -> bool:
        assert self.before_own.wait(PATIENCE_S)
        if self.fail_own is not None:
            error, self.fail_own = self.fail_own, None
            raise error
        self.own_shards.append(number)
        return super().compute_shard(number)

    def keep_copy(self, source: str, copy: AdapterCopy) -> None:
        self.kept.append(copy.key)
        super().keep_copy(source, copy)

    def drop_copy(self, key: str) -> None:
        self.dropped.append(key)
        super().drop_copy(key)

    def run_shard(self, task: ShardTask) -> ShardResult | None:
        result = super().run_shard(task)
        if result is None:
            return None
        self.entered.set()
        if self.hold:
            assert self.release.wait(PATIENCE_S)
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        self.helped.append(task)
        return result


@contextmanager
def pool(home: Path, model: Path, **settings: Any) -> Iterator[tuple[Caller, Sequence[ObservedBackend]]]:
    """An engine with trainers in this process; new runs are on the first one."""
    engine_config = config(home, model, **{**POOL, **settings})
    backends = [ObservedBackend(engine_config) for _ in range(engine_config.trainers)]
    engine = Engine(engine_config, backends=backends)
    engine.start()
    engine.load_models().result(PATIENCE_S)
    try:
        yield Caller(engine), backends
    finally:
        for each in backends:
            each.release.set()
            each.before_own.set()
        engine.close()


def state_of(backend: LocalBackend, run: str) -> tuple[bytes, ...]:
    state = backend.state(run)
    buffers = (state.adapter.params, state.grad, state.exp_avg, state.exp_avg_sq)
    return tuple(b"" if each is None else each.numpy().tobytes() for each in buffers)


def train(ada: Caller, run: str) -> list[Any]:
    """Passes, steps and a forward pass; returns what they gave."""
    found: list[Any] = []
    for n in range(1, 6, 2):
        output = ada.run(forward_backward(run, n, data=batch(n)))
        found.append(comparable(output))
        found.append(ada.run(optim_step(run, n + 1)))
    found.append(comparable(ada.run(forward_backward(run, 7, data=batch(7), forward_only=True))))
    found.append(comparable(ada.run(forward_backward(run, 8, data=batch(8)))))
    return found


def comparable(output: ForwardBackwardOutput) -> tuple[dict[str, float], list[bytes]]:
    arrays = [each[name].to_numpy().tobytes() for each in output.loss_fn_outputs for name in sorted(each)]
    return dict(output.metrics), arrays


@pytest.mark.slow
def test_several_trainers_give_the_bits_of_one_in_the_same_layout(tiny_model: Path, tmp_path: Path) -> None:
    with pool(tmp_path / "one", tiny_model, trainers=1) as (ada, (alone,)):
        run = ada.create()
        expected = train(ada, run)
        assert len(alone.own_shards) > 4
        assert alone.passes == 0
        expected_state = state_of(alone, run)
    with pool(tmp_path / "two", tiny_model) as (ada, (home, helper)):
        run = ada.create()
        assert train(ada, run) == expected
        assert helper.helped
        assert home.own_shards
        assert state_of(home, run) == expected_state


class CountingProcess(ProcessBackend):
    """A worker process; counts the shards that it computed for another."""

    num_helped = 0

    def run_shard(self, task: ShardTask) -> ShardResult | None:
        result = super().run_shard(task)
        self.num_helped += result is not None
        return result


class CountingNode(RayBackend):
    """A node of a cluster; counts in the same way."""

    num_helped = 0

    def run_shard(self, task: ShardTask) -> ShardResult | None:
        result = super().run_shard(task)
        self.num_helped += result is not None
        return result


def workers(kind: str, settings: EngineConfig, machines: Machines) -> list[CountingProcess | CountingNode]:
    callbacks = Callbacks(None, lambda: None, lambda _: None)
    if kind == "process":
        return [CountingProcess(settings, callbacks) for _ in range(2)]
    specs = [LaneSpec(f"trainer-{n}", Role.TRAIN) for n in range(2)]
    return [
        CountingNode(Place(machines, spec, {"CPU": 1.0}), settings, callbacks)  # type: ignore[arg-type]  # the same methods
        for spec in specs
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["process", "ray"])
def test_processes_and_nodes_give_the_bits_of_one_trainer(
    tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    with pool(tmp_path / "one", tiny_model, trainers=1) as (ada, _):
        expected = train(ada, ada.create())
    machines = Machines()
    settings = config(tmp_path / "two", tiny_model, worker="process", **POOL)
    backends = workers(kind, settings, machines)
    engine = Engine(settings, backends=backends)
    engine.start()
    try:
        engine.load_models().result(PATIENCE_S)
        ada = Caller(engine)
        assert train(ada, ada.create()) == expected
        assert sum(each.num_helped for each in backends)
    finally:
        engine.close()
        machines.close()


@pytest.mark.slow
def test_a_pass_in_shards_is_the_whole_pass_up_to_rounding(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path / "whole", tiny_model, threads=1) as ada:
        expected = ada.run(forward_backward(ada.create(), 1, data=batch(1)))
    with pool(tmp_path / "cut", tiny_model) as (ada, _):
        output = ada.run(forward_backward(ada.create(), 1, data=batch(1)))
    assert output.metrics == pytest.approx(dict(expected.metrics), rel=1e-5)
    for mine, theirs in zip(output.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        for name in theirs:
            np.testing.assert_allclose(mine[name].to_numpy(), theirs[name].to_numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [None, 0], ids=["default", "off"])
def test_one_trainer_does_not_cut_passes(tiny_model: Path, tmp_path: Path, tokens: int | None) -> None:
    settings = {"trainers": 1, "data_parallel_tokens": tokens, "max_tokens_per_pass": SHARD}
    with pool(tmp_path, tiny_model, **settings) as (ada, (backend,)):
        ada.run(forward_backward(ada.create(), 1, data=batch(1)))
        assert (backend.passes, backend.own_shards) == (1, [])


@pytest.mark.slow
def test_several_trainers_cut_what_exceeds_the_budget_of_a_pass(tiny_model: Path, tmp_path: Path) -> None:
    settings = {"data_parallel_tokens": None, "max_tokens_per_pass": SHARD}
    with pool(tmp_path, tiny_model, **settings) as (ada, (home, _)):
        run = ada.create()
        ada.run(forward_backward(run, 1, data=batch(1, num_datums=1)))
        assert home.passes == 1
        ada.run(forward_backward(run, 2, data=batch(1)))
        assert home.passes == 1
        assert home.own_shards


@pytest.mark.slow
def test_a_pass_that_is_cut_shares_its_turn_with_no_other_and_the_cut_is_recorded(
    tiny_model: Path, tmp_path: Path
) -> None:
    with pool(tmp_path, tiny_model, max_tokens_per_pass=4096, trainers=1) as (ada, _):
        runs = [ada.create(n, seed=n) for n in range(2)]
        with ada.engine.paused():
            small = [ada.submit(forward_backward(run, 1)) for run in runs]
            large = [ada.submit(forward_backward(run, 2, data=batch(2))) for run in runs]
        for request_id in [*small, *large]:
            assert not ada.outcome(request_id).error
        passes = [turn for turn in turns(ada) if turn[0].seq_id]
        assert sorted(len(turn) for turn in passes) == [1, 1, 2]
        cut = {entry.seq_id: (entry.num_shards, entry.shard_threads) for turn in passes for entry in turn}
        assert cut[1] == (1, 0)
        assert cut[2][0] > 2
        assert cut[2][1] == 1, "the threads of the trainer"


@pytest.mark.slow
@pytest.mark.parametrize(
    "now", [{"data_parallel_tokens": 0, "threads": 2}, {"data_parallel_tokens": 90, "trainers": 2}]
)
def test_a_replay_cuts_a_pass_as_it_was_cut_whatever_the_settings_are_now(
    tiny_model: Path, tmp_path: Path, now: dict[str, int]
) -> None:
    with pool(tmp_path, tiny_model) as (ada, (home, _)):
        run = ada.create()
        train(ada, run)
        expected = state_of(home, run)
    with pool(tmp_path, tiny_model, **{"trainers": 1, **now}) as (ada, backends):
        ada.run(forward_backward(run, 9, forward_only=True))
        home = next(each for each in backends if each.own_shards)
        assert state_of(home, run) == expected


@pytest.mark.slow
def test_a_pass_that_was_not_cut_is_replayed_whole(tiny_model: Path, tmp_path: Path) -> None:
    with pool(tmp_path, tiny_model, data_parallel_tokens=0) as (ada, (home, _)):
        run = ada.create()
        train(ada, run)
        expected = state_of(home, run)
    with pool(tmp_path, tiny_model) as (ada, backends):
        ada.run(forward_backward(run, 9, forward_only=True))
        home = next(each for each in backends if each.passes)
        assert not home.own_shards
        assert state_of(home, run) == expected


@pytest.mark.slow
def test_an_adapter_is_sent_once_per_version_and_dropped_after_it(tiny_model: Path, tmp_path: Path) -> None:
    with pool(tmp_path, tiny_model) as (ada, (_, helper)):
        run = ada.create()
        for n in (1, 2, 3):
            ada.run(forward_backward(run, n, data=batch(n)))
        assert len(helper.kept) == 1
        assert not helper.dropped
        ada.run(optim_step(run, 4))
        ada.run(forward_backward(run, 5, data=batch(5)))
        assert len(set(helper.kept)) == 2
        assert helper.dropped == helper.kept[:1]
        saved = ada.run(SaveWeightsRequest(model_id=run, seq_id=6, path="saved"))
        ada.run(LoadWeightsRequest(model_id=run, seq_id=7, path=saved["path"]))
        ada.run(forward_backward(run, 8, data=batch(8)))
        assert len(set(helper.kept)) == 3


@pytest.mark.slow
def test_a_trainer_without_room_for_the_adapter_does_not_help(tiny_model: Path, tmp_path: Path) -> None:
    with pool(tmp_path / "probe", tiny_model) as (ada, (home, _)):
        run = ada.create()
        num_bytes = home.state(run).adapter.params.nbytes
    # Each trainer has room for one run, of four buffers; the other one's is taken.
    with pool(tmp_path, tiny_model, max_live_bytes=2 * (4 * num_bytes + 1)) as (ada, (home, helper)):
        runs = [ada.create(n) for n in range(2)]
        ada.run(forward_backward(runs[0], 1, data=batch(1)))
        assert home.own_shards
        assert not helper.helped


@pytest.mark.slow
def test_a_trainer_with_work_of_its_own_is_not_asked(tiny_model: Path, tmp_path: Path) -> None:
    with pool(tmp_path, tiny_model) as (ada, (first, second)):
        here, there = ada.create(0), ada.create(1)
        second.before_own.clear()
        held = ada.submit(forward_backward(there, 1, data=batch(1)))
        output = ada.run(forward_backward(here, 1, data=batch(1)))
        assert not second.helped
        assert output.metrics["num_tokens:sum"]
        second.before_own.set()
        assert not ada.outcome(held).error
        assert first.own_shards


@pytest.mark.slow
def test_what_waits_for_a_trainer_runs_after_the_shard_that_it_computes(
    tiny_model: Path, tmp_path: Path
) -> None:
    with pool(tmp_path, tiny_model) as (ada, (home, helper)):
        here, there = ada.create(0), ada.create(1)
        home.before_own.clear()
        helper.hold = True
        large = ada.submit(forward_backward(here, 1, data=batch(1, 24)))
        assert helper.entered.wait(PATIENCE_S)
        own = ada.submit(forward_backward(there, 1))
        helper.hold = False
        helper.release.set()
        assert not ada.outcome(own).error
        home.before_own.set()
        assert not ada.outcome(large).error


LOST = WorkerLost("it was terminated by SIGKILL", own_fault=False)


@pytest.mark.slow
@pytest.mark.parametrize("error", [LOST, RuntimeError("out of order")], ids=["lost", "error"])
def test_a_shard_that_another_trainer_does_not_return_is_computed_at_home(
    tiny_model: Path, tmp_path: Path, error: Exception
) -> None:
    with pool(tmp_path / "one", tiny_model, trainers=1) as (ada, (alone,)):
        run = ada.create()
        expected = comparable(ada.run(forward_backward(run, 1, data=batch(1))))
        expected_state = state_of(alone, run)
    with pool(tmp_path / "two", tiny_model) as (ada, (home, helper)):
        run = ada.create()
        helper.fail = error
        home.before_own.clear()
        request_id = ada.submit(forward_backward(run, 1, data=batch(1)))
        assert helper.entered.wait(PATIENCE_S)
        home.before_own.set()
        outcome = ada.outcome(request_id)
        assert not outcome.error
        assert comparable(wire_proto.decode_forward_backward_output(outcome.result)) == expected
        assert state_of(home, run) == expected_state
        ada.run(optim_step(run, 2))


@pytest.mark.slow
def test_a_shard_that_takes_far_too_long_elsewhere_is_computed_at_home(
    tiny_model: Path, tmp_path: Path
) -> None:
    with pool(tmp_path, tiny_model) as (ada, (home, helper)):
        run = ada.create()
        home.before_own.clear()
        helper.hold = True
        request_id = ada.submit(forward_backward(run, 1, data=batch(1)))
        assert helper.entered.wait(PATIENCE_S)
        home.before_own.set()
        assert not ada.outcome(request_id).error
        assert not helper.helped
        before = state_of(home, run)
        helper.release.set()  # its result comes too late, and changes nothing
        ada.run(forward_backward(run, 2, forward_only=True))
        assert state_of(home, run) == before


@pytest.mark.slow
def test_a_home_trainer_that_is_lost_repeats_the_turn(tiny_model: Path, tmp_path: Path) -> None:
    with pool(tmp_path / "one", tiny_model, trainers=1) as (ada, (_alone,)):
        expected = comparable(ada.run(forward_backward(ada.create(), 1, data=batch(1))))
    with pool(tmp_path / "two", tiny_model) as (ada, (home, _helper)):
        run = ada.create()
        home.fail_own = LOST
        outcome = ada.outcome(ada.submit(forward_backward(run, 1, data=batch(1))))
        assert not outcome.error
        assert comparable(wire_proto.decode_forward_backward_output(outcome.result)) == expected
        ada.run(optim_step(run, 2))
        recorded = [entry for turn in turns(ada) for entry in turn if entry.seq_id == 1]
        assert len(recorded) == 1


@pytest.mark.slow
def test_a_pass_that_fails_fails_as_a_whole_and_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    def broken(data: list[Datum]) -> list[Datum]:
        length = len(data[3].loss_fn_inputs["target_tokens"].to_numpy())
        inputs = {**data[3].loss_fn_inputs, "weights": np.full(length, 3e38)}
        return [*data[:3], Datum(data[3].model_input, inputs), *data[4:]]

    errors = []
    for name, settings in {"whole": {"data_parallel_tokens": 0}, "cut": {}}.items():
        with pool(tmp_path / name, tiny_model, **settings) as (ada, (home, _)):
            run = ada.create()
            ada.run(forward_backward(run, 1, data=batch(1)))
            before = state_of(home, run)
            outcome = ada.outcome(ada.submit(forward_backward(run, 2, data=broken(batch(2)))))
            errors.append(outcome.error)
            assert state_of(home, run) == before
            ada.run(optim_step(run, 3))
    assert errors[0]
    assert errors[0] == errors[1]


def test_a_negative_number_of_tokens_is_rejected() -> None:
    with pytest.raises(SetupError, match="data_parallel_tokens is -1"):
        EngineConfig(data_parallel_tokens=-1)
