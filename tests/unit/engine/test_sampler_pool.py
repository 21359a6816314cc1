"""Samplers that come and go with the load: nothing is lost, and the numbers are those of one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.test_engine import Caller, config, sample
from tests.unit.engine.test_lanes import PATIENCE_S, GatedBackend
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.engine.lanes.interface import NoFreeNode, WorkerLost
from tinkex.types import SamplingParams

pytestmark = pytest.mark.slow

ELASTIC = {"threads": 1, "max_decode_batch": 1, "min_samplers": 1, "max_samplers": 3, "sampler_idle_s": 0.2}
LONG = SamplingParams(max_tokens=48, stop=[], seed=5)


@contextmanager
def elastic(
    home: Path, model: Path, added: Callable[[EngineConfig], GatedBackend] = GatedBackend, **settings: Any
) -> Iterator[tuple[Caller, list[GatedBackend]]]:
    """An engine on gated backends: a trainer, the samplers that there always are, and those that are added."""
    engine_config = config(home, model, **{**ELASTIC, **settings})
    fixed = 1 + engine_config.fewest_samplers
    backends = [GatedBackend(engine_config) for _ in range(fixed)]
    backends += [added(engine_config) for _ in range(20)]
    engine = Engine(engine_config, backends=backends)
    engine.start()
    engine.load_models().result(PATIENCE_S)
    try:
        yield Caller(engine), backends
    finally:
        for each in backends:
            each.release.set()
        engine.close()


def wait_until(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.02)):
        if holds():
            return
        pause.wait(0.02)
    raise AssertionError("it did not happen")


def names(ada: Caller) -> list[str]:
    return [lane.name for lane in ada.engine.stats().lanes]


def submit(ada: Caller, number: int, params: SamplingParams = LONG) -> list[str]:
    sampler = ada.sampler(base_model="tiny")
    return [ada.submit(sample(sampler, n, sampling_params=params)) for n in range(number)]


def result(ada: Caller, request_id: str) -> bytes:
    outcome = ada.outcome(request_id)
    assert not outcome.error
    return bytes(outcome.result[-64:])


def test_samplers_are_added_while_samples_wait_and_removed_when_they_do_not(
    tiny_model: Path, tmp_path: Path
) -> None:
    with elastic(tmp_path, tiny_model) as (ada, backends):
        assert names(ada) == ["trainer-0", "sampler-0"]
        requests = submit(ada, 8)
        wait_until(lambda: names(ada) == ["trainer-0", "sampler-0", "sampler-1", "sampler-2"])
        assert all(backend.entered.wait(PATIENCE_S) for backend in backends[1:4]), "each got one"
        for each in backends:
            each.release.set()
        assert len({result(ada, request) for request in requests}) == 1, "the same seed, the same sample"
        wait_until(lambda: names(ada) == ["trainer-0", "sampler-0"])
        counts = ada.engine.samplers
        assert counts is not None
        assert (counts.running, counts.starting, counts.draining) == (1, 0, 0)
        assert [result(ada, request) for request in submit(ada, 2)]
        assert ada.engine.health.status == "ok"


def test_a_sampler_that_is_removed_finishes_its_samples_and_gets_no_more(
    tiny_model: Path, tmp_path: Path
) -> None:
    with elastic(tmp_path, tiny_model, max_decode_batch=4, max_samplers=2) as (ada, backends):
        requests = submit(ada, 6)
        wait_until(lambda: names(ada) == ["trainer-0", "sampler-0", "sampler-1"])
        assert backends[2].entered.wait(PATIENCE_S)
        backends[1].release.set()  # the other one finishes what it has
        wait_until(lambda: (counts := ada.engine.samplers) is not None and counts.draining == 1)
        more = submit(ada, 2)
        found = {result(ada, request) for request in more}
        assert "sampler-1" in names(ada), "it has samples"
        backends[2].release.set()
        assert found == {result(ada, request) for request in requests}
        wait_until(lambda: names(ada) == ["trainer-0", "sampler-0"])


def test_samples_of_a_lost_sampler_that_is_being_removed_are_taken_by_others(
    tiny_model: Path, tmp_path: Path
) -> None:
    with elastic(tmp_path, tiny_model, max_decode_batch=4, max_samplers=2) as (ada, backends):
        requests = submit(ada, 6)
        wait_until(lambda: names(ada) == ["trainer-0", "sampler-0", "sampler-1"])
        assert backends[2].entered.wait(PATIENCE_S)
        backends[1].release.set()
        wait_until(lambda: (counts := ada.engine.samplers) is not None and counts.draining == 1)
        backends[2].lost = True
        backends[2].release.set()
        assert len({result(ada, request) for request in requests}) == 1
        wait_until(lambda: names(ada) == ["trainer-0", "sampler-0"])
        assert ada.engine.health.status == "ok"


def test_without_room_it_says_so_once_and_samples_are_computed_by_those_there(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class NoneFits(GatedBackend):
        num_tries = 0

        def start(self) -> None:
            type(self).num_tries += 1
            raise NoFreeNode("none of 2 nodes of the cluster has CPU=1 free")

    with elastic(tmp_path, tiny_model, NoneFits) as (ada, backends):
        requests = submit(ada, 8)
        wait_until(lambda: NoneFits.num_tries >= 2)
        wait_until(lambda: names(ada) == ["trainer-0", "sampler-0"])
        for each in backends:
            each.release.set()
        assert len({result(ada, request) for request in requests}) == 1
        assert ada.engine.health.status == "ok", "it works at its capacity"
    said = [record.message for record in caplog.records if "no sampler can be added" in record.message]
    assert len(said) == 1
    assert "none of 2 nodes of the cluster has CPU=1 free" in said[0]


def test_the_first_sampler_of_none_is_added_for_the_first_sample(tiny_model: Path, tmp_path: Path) -> None:
    with elastic(tmp_path, tiny_model, min_samplers=0) as (ada, backends):
        assert names(ada) == ["trainer-0"]
        (request,) = submit(ada, 1)
        assert ada.engine.queue_state(request).state in {"paused_capacity", "active"}
        for each in backends:
            each.release.set()
        assert result(ada, request)
        wait_until(lambda: names(ada) == ["trainer-0"])


def test_a_sampler_that_was_added_and_lost_is_started_again(tiny_model: Path, tmp_path: Path) -> None:
    with elastic(tmp_path, tiny_model, max_samplers=2) as (ada, backends):
        requests = submit(ada, 6)
        assert backends[2].entered.wait(PATIENCE_S)
        backends[2].lost = True
        for each in backends:
            each.release.set()
        assert len({result(ada, request) for request in requests}) == 1


def test_an_error_of_the_start_is_not_taken_for_a_lack_of_room(tiny_model: Path, tmp_path: Path) -> None:
    class FailsOnce(GatedBackend):
        num_tries = 0

        def start(self) -> None:
            type(self).num_tries += 1
            if self.num_tries == 1:
                raise WorkerLost("it cannot be started (of a test)", own_fault=False)
            super().start()

    with elastic(tmp_path, tiny_model, FailsOnce, max_samplers=2) as (ada, backends):
        requests = submit(ada, 6)
        wait_until(lambda: FailsOnce.num_tries >= 2)
        for each in backends:
            each.release.set()
        assert len({result(ada, request) for request in requests}) == 1
