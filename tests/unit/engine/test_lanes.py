"""Several lanes: the numbers are those of one lane, they work at the same time, and none waits for another."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.durability.test_replay import data, running
from tests.unit.engine.test_engine import Caller, config, forward_backward, optim_step, sample
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.engine.lanes.in_process import LocalBackend
from tinkex.engine.lanes.interface import DecodeReport, DecodeStep, PassJob, PassReport, WorkerLost
from tinkex.errors import SetupError
from tinkex.types import ModelInput, SamplingParams, SaveWeightsForSamplerRequest, UnloadModelRequest

PATIENCE_S = 60.0
POOL = {"trainers": 2, "samplers": 2, "threads": 1, "deterministic": True}


def train_and_sample(ada: Caller) -> list[Any]:
    """Three runs, their losses, and what is sampled from each of them."""
    runs = [ada.create(number, seed=number) for number in range(3)]
    passes = [
        ada.submit(forward_backward(run, n, data=data(n)) if n % 2 else optim_step(run, n))
        for n in range(1, 7)
        for run in runs
    ]
    outcomes = [ada.outcome(request_id) for request_id in passes]
    assert not any(outcome.error for outcome in outcomes)
    found: list[Any] = [outcome.result for outcome in outcomes]
    for number, run in enumerate(runs):
        saved = ada.run(SaveWeightsForSamplerRequest(model_id=run, seq_id=7, sampling_session_seq_id=number))
        params = SamplingParams(max_tokens=8, seed=number, stop=[])
        requests = [
            ada.submit(sample(saved["sampling_session_id"], n, num_samples=2, sampling_params=params))
            for n in range(4)
        ]
        found += [ada.outcome(request_id).result for request_id in requests]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "lanes", [POOL, {**POOL, "samplers": 0}, {**POOL, "trainers": 1}], ids=["2+2", "2", "1+2"]
)
def test_several_lanes_give_the_numbers_of_one(
    tiny_model: Path, tmp_path: Path, lanes: dict[str, Any]
) -> None:
    with running(tmp_path / "one", tiny_model, threads=1, deterministic=True) as ada:
        expected = train_and_sample(ada)
    with running(tmp_path / "several", tiny_model, **lanes) as ada:
        assert train_and_sample(ada) == expected


@pytest.mark.slow
def test_runs_stay_on_their_trainers_over_a_restart_and_with_fewer_trainers(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running(tmp_path, tiny_model, **POOL) as ada:
        runs = [ada.create(number) for number in range(4)]
        rows = [ada.engine.store.runs.get(run) for run in runs]
        lanes = [row.lane for row in rows if row is not None]
        assert sorted(map(str, lanes)) == ["trainer-0", "trainer-0", "trainer-1", "trainer-1"]
        for run in runs:
            ada.run(forward_backward(run, 1))
    with running(tmp_path, tiny_model, **POOL) as ada:
        for run in runs:
            ada.run(optim_step(run, 2))
        rows = [ada.engine.store.runs.get(run) for run in runs]
        assert [row.lane for row in rows if row is not None] == lanes
    with running(tmp_path, tiny_model, threads=1, deterministic=True) as ada:
        for run in runs:
            ada.run(forward_backward(run, 3))
            ada.run(UnloadModelRequest(model_id=run))


class GatedBackend(LocalBackend):
    """Waits in every pass, or decode step, until it is released; ``lost`` makes the next one lose the worker."""

    def __init__(self, engine_config: EngineConfig) -> None:
        super().__init__(engine_config)
        self.entered, self.release = threading.Event(), threading.Event()
        self.lost = False
        self.calls = 0

    def _wait(self) -> None:
        self.calls += 1
        self.entered.set()
        assert self.release.wait(PATIENCE_S)
        if self.lost:
            self.lost = False
            raise WorkerLost("it was terminated by SIGKILL", own_fault=False)

    def run_pass(self, jobs: Sequence[PassJob], *, share_prefixes: bool) -> Sequence[PassReport] | None:
        self._wait()
        return super().run_pass(jobs, share_prefixes=share_prefixes)

    def sample(self, source: str, step: DecodeStep) -> DecodeReport:
        self._wait()
        return super().sample(source, step)


@contextmanager
def gated(home: Path, model: Path, lanes: dict[str, Any]) -> Iterator[tuple[Caller, Sequence[GatedBackend]]]:
    """An engine on gated backends, trainers first."""
    settings = config(home, model, **lanes)
    backends = [GatedBackend(settings) for _ in range(settings.trainers + settings.samplers)]
    engine = Engine(settings, backends=backends)
    engine.start()
    try:
        yield Caller(engine), backends
    finally:
        for each in backends:
            each.release.set()
        engine.close()


@pytest.mark.slow
def test_a_pass_that_takes_long_delays_neither_samples_nor_the_runs_of_other_trainers(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings = config(tmp_path, tiny_model, **{**POOL, "samplers": 1})
    backends = [GatedBackend(settings) for _ in range(3)]
    slow, fast, sampler = backends
    fast.release.set()
    sampler.release.set()
    engine = Engine(settings, backends=backends)
    engine.start()
    try:
        ada = Caller(engine)
        here, there = ada.create(0), ada.create(1)
        held = ada.submit(forward_backward(here, 1))
        assert slow.entered.wait(PATIENCE_S)
        ada.run(forward_backward(there, 1))
        ada.run(optim_step(there, 2))
        ada.run(sample(ada.sampler(base_model="tiny")))
        assert engine.stats().lanes[0].is_busy
        slow.release.set()
        assert not ada.outcome(held).error
    finally:
        for each in backends:
            each.release.set()
        engine.close()


@pytest.mark.slow
def test_the_only_operation_of_a_run_on_a_lost_trainer_completes(tiny_model: Path, tmp_path: Path) -> None:
    with gated(tmp_path, tiny_model, POOL) as (ada, backends):
        run = ada.create()
        held = ada.submit(forward_backward(run, 1))
        assert backends[0].entered.wait(PATIENCE_S)
        backends[0].lost = True
        for each in backends:
            each.release.set()
        assert not ada.outcome(held).error
        ada.run(optim_step(run, 2))


@pytest.mark.slow
def test_what_ran_on_a_lost_sampler_is_sampled_by_another(tiny_model: Path, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4, stop=[], seed=5)
    with gated(tmp_path, tiny_model, POOL) as (ada, backends):
        sampler = ada.sampler(base_model="tiny")
        requests = [ada.submit(sample(sampler, n, sampling_params=params)) for n in range(4)]
        assert backends[2].entered.wait(PATIENCE_S)
        backends[2].lost = True
        backends[3].release.set()
        backends[2].release.set()
        results = {bytes(ada.outcome(request).result) for request in requests}
        assert len({result[-8:] for result in results}) == 1, "the same seed"


@pytest.mark.slow
def test_samples_of_one_prompt_go_to_the_sampler_that_has_it(tiny_model: Path, tmp_path: Path) -> None:
    settings = config(tmp_path, tiny_model, **{**POOL, "trainers": 1})
    backends = [GatedBackend(settings) for _ in range(3)]
    for each in backends:
        each.release.set()
    engine = Engine(settings, backends=backends)
    engine.start()
    try:
        ada = Caller(engine)
        sampler = ada.sampler(base_model="tiny")
        prompt = ModelInput.from_ints([5 + n % 90 for n in range(64)])
        for n in range(6):
            ada.run(sample(sampler, n, prompt=prompt))
        assert sorted(bool(each.calls) for each in backends[1:]) == [False, True]
    finally:
        engine.close()


@pytest.mark.parametrize("lanes", [{"trainers": 0}, {"samplers": -1}, {"trainers": 257}])
def test_impossible_numbers_of_workers_are_rejected(lanes: dict[str, int]) -> None:
    with pytest.raises(SetupError, match="trainers, and 0 to 256 samplers"):
        EngineConfig(**lanes)
