"""Samples whose step goes wrong, and samples of weights that are not what was written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.durability.test_replay import running
from tests.unit.engine.test_engine import Caller, config, forward_backward, optim_step, sample
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.engine.lanes.in_process import LocalBackend
from tinkex.engine.lanes.interface import DecodeReport, DecodeStep
from tinkex.engine.sampler.sampler import Sampler
from tinkex.types import SamplingParams, SaveWeightsForSamplerRequest, SaveWeightsRequest

PATIENCE_S = 60.0
FIRST = SamplingParams(max_tokens=40, stop=[], seed=1)


def fails_once(method: Callable[..., Any], times: int) -> Callable[..., Any]:
    """A method that raises at one call."""
    calls = iter(range(1_000_000))

    def called(*arguments: Any, **more: Any) -> Any:
        if next(calls) == times:
            raise RuntimeError("something nobody thought of")
        return method(*arguments, **more)

    return called


@pytest.mark.slow
def test_after_a_step_that_failed_in_a_full_batch_the_others_get_their_places(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, tiny_model, max_decode_batch=1) as ada:
        sampler = ada.sampler(base_model="tiny")
        ada.run(sample(sampler))
        monkeypatch.setattr(Sampler, "step", fails_once(Sampler.step, times=3))
        requests = [ada.submit(sample(sampler, sampling_params=FIRST)) for _ in range(4)]
        outcomes = [ada.outcome(request) for request in requests]
        assert [bool(outcome.error) for outcome in outcomes] == [True, False, False, False]


def test_an_unexpected_failure_to_join_leaves_no_sequence_in_the_batch(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, tiny_model) as ada:
        sampler = ada.sampler(base_model="tiny")
        ada.run(sample(sampler))
        monkeypatch.setattr(Sampler, "add", fails_once(Sampler.add, times=1))
        requests = [ada.submit(sample(sampler, sampling_params=FIRST)) for _ in range(2)]
        for request in requests:
            ada.outcome(request)
        ada.run(sample(sampler))
        report = ada.engine.backend.sample(str(tiny_model), DecodeStep())
        assert not report.ended
        assert not report.batch.num_sequences


class SteppedBackend(LocalBackend):
    """Stops before its fifth decode step until ``resume`` is set."""

    def __init__(self, engine_config: EngineConfig) -> None:
        super().__init__(engine_config)
        self.steps: list[DecodeStep] = []
        self.stopped, self.resume = threading.Event(), threading.Event()

    def sample(self, source: str, step: DecodeStep) -> DecodeReport:
        self.steps.append(step)
        if len(self.steps) == 5:
            self.stopped.set()
            assert self.resume.wait(PATIENCE_S)
        return super().sample(source, step)


@pytest.mark.parametrize("action", ["join", "cancel"])
def test_samples_join_and_are_cancelled_with_the_next_step(
    tiny_model: Path, tmp_path: Path, action: str
) -> None:
    engine_config = config(tmp_path, tiny_model)
    backend = SteppedBackend(engine_config)
    engine = Engine(engine_config, backends=[backend])
    engine.start()
    try:
        ada = Caller(engine)
        sampler = ada.sampler(base_model="tiny")
        first = ada.submit(sample(sampler, sampling_params=FIRST))
        assert backend.stopped.wait(PATIENCE_S)
        if action == "cancel":
            engine.cancel(ada.owner, first)
        second = ada.submit(sample(sampler))
        with engine.paused():
            pass  # the loop has received both
        backend.resume.set()
        assert (action == "cancel") == ("cancelled" in ada.outcome(first).error)
        assert not ada.outcome(second).error
        assert [request.request_id for request in backend.steps[5].add] == [second]
        assert list(backend.steps[5].cancel) == ([first] if action == "cancel" else [])
    finally:
        backend.resume.set()
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "kept"])
def test_weights_that_are_not_as_they_were_written_are_never_sampled_from(
    tiny_model: Path, tmp_path: Path, name: str | None
) -> None:
    with running(tmp_path, tiny_model, snapshots_in_memory=1) as ada:
        run = ada.create()
        ada.run(forward_backward(run, 1))
        ada.run(optim_step(run, 2))
        number = {"path": name} if name else {"sampling_session_seq_id": 0}
        saved = ada.run(SaveWeightsForSamplerRequest(model_id=run, seq_id=3, **number))
        sampler = ada.sampler(model_path=saved["path"]) if name else saved["sampling_session_id"]
        ada.run(forward_backward(run, 4))
        ada.run(optim_step(run, 5))
        other = ada.run(SaveWeightsForSamplerRequest(model_id=run, seq_id=6, sampling_session_seq_id=1))
        expected = ada.logprobs(sampler)
        row = ada.engine.store.samplers.get(sampler)
        assert row is not None
        assert row.directory is not None
        directory = ada.engine.store.directories.resolve(row.directory)
        for file in sorted(directory.iterdir()):
            whole = file.read_bytes()
            for place in (0, len(whole) // 2, len(whole) - 1):
                file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x51]) + whole[place + 1 :])
                ada.logprobs(other["sampling_session_id"])  # which takes the one place in memory
                outcome = ada.outcome(ada.submit(sample(sampler)))
                assert file.name in outcome.error, (file.name, place)
            file.write_bytes(whole)
        assert ada.logprobs(sampler) == pytest.approx(expected, nan_ok=True, abs=0)
        assert ada.run(SaveWeightsRequest(model_id=run, seq_id=7, path="still-there"))


def test_a_sample_of_another_user_joins_a_batch_that_one_user_fills(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model, max_decode_batch=2) as ada:
        bob = Caller(ada.engine, "bob", "s-bob")
        long = SamplingParams(max_tokens=300, stop=[], seed=1)
        many = ada.submit(sample(ada.sampler(base_model="tiny"), sampling_params=long, num_samples=60))
        bob.run(sample(bob.sampler(base_model="tiny"), sampling_params=FIRST))
        assert asyncio.run(ada.engine.wait(ada.owner, many, 0.0)) is None, "thousands of steps are left"
        ada.engine.cancel(ada.owner, many)
