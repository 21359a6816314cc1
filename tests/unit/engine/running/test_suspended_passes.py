"""A pass whose custom loss takes long lets operations of others run before it has ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.hostile_user import costly_loss
from tests.unit.engine.lanes.crashing import crashing_engine
from tests.unit.engine.test_engine import TOKENS, Caller, config, forward_backward, optim_step, sample
from tinkex._wire import proto as wire_proto
from tinkex.engine.engine import Engine
from tinkex.engine.lanes.in_process import LocalBackend
from tinkex.engine.lanes.interface import PassJob, PassReport
from tinkex.types import CreateCustomLossRequest, Datum, ModelInput, SaveWeightsRequest

pytestmark = pytest.mark.slow

PATIENCE_S = 10.0
OUTCOME_S = 240.0
"""Patience for a pass that may need a new worker."""
NUM_DATUMS, NUM_NODES = 100, 160
"""As costly as a pass may be: several slices."""


class WaitingBackend(LocalBackend):
    """Begins and continues a costly pass only when the others have arrived, or after a while."""

    def __init__(self, engine_config: Any) -> None:
        super().__init__(engine_config)
        self.started = threading.Event()
        self.others = threading.Event()
        self.num_resumed = 0

    def run_pass(self, jobs: Sequence[PassJob], *, share_prefixes: bool) -> Sequence[PassReport] | None:
        if any(job.custom_loss is not None for job in jobs):
            self.started.set()
            self.others.wait(PATIENCE_S)
        return super().run_pass(jobs, share_prefixes=share_prefixes)

    def resume_pass(self) -> Sequence[PassReport] | None:
        self.num_resumed += 1
        return super().resume_pass()


@contextmanager
def waiting_engine(home: Path, model: Path) -> Iterator[tuple[Engine, WaitingBackend]]:
    engine_config = config(home, model)
    backend = WaitingBackend(engine_config)
    engine = Engine(engine_config, backends=[backend])
    engine.start()
    try:
        yield engine, backend
    finally:
        backend.others.set()
        engine.close()


def upload(ada: Caller) -> str:
    request = CreateCustomLossRequest.model_validate(
        {
            "session_id": ada.session,
            "custom_loss_seq_id": 0,
            "name": "costly",
            "inputs": [{"name": "logprobs", "rank": 1}],
            "graph": {"format": 1, "nodes": costly_loss(NUM_NODES)},
        }
    )
    loss_id: str = ada.run(request)["loss_id"]
    return loss_id


def costly_pass(run: str, seq_id: int, loss_id: str) -> Any:
    data = [Datum(ModelInput.from_ints(TOKENS[:-1]), {"target_tokens": TOKENS[1:]})] * NUM_DATUMS
    return forward_backward(run, seq_id, data=data, loss_fn="custom", loss_fn_config={"loss_id": loss_id})


def finish_order(engine: Engine, request_ids: Sequence[str]) -> list[str]:
    rows = engine.store.database.all("SELECT request_id FROM finished ORDER BY number")
    return [row["request_id"] for row in rows if row["request_id"] in request_ids]


def train(ada: Caller, run: str, loss_id: str) -> list[Any]:
    """A costly pass and a step, as numbers that can be compared."""
    passed = ada.outcome(ada.submit(costly_pass(run, 1, loss_id)), OUTCOME_S)
    assert not passed.error, passed.error
    output = wire_proto.decode_forward_backward_output(passed.result)
    logprobs = [record["logprobs"].to_numpy().tobytes() for record in output.loss_fn_outputs]
    return [output.metrics, logprobs, ada.run(optim_step(run, 2))]


@pytest.fixture(scope="module")
def expected(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The numbers of :func:`train` when nobody else is there."""
    engine = Engine(config(tmp_path_factory.mktemp("alone"), tiny_model))
    engine.start()
    try:
        ada = Caller(engine)
        return train(ada, ada.create(), upload(ada))
    finally:
        engine.close()


def test_operations_of_others_run_before_a_costly_pass_has_ended_and_change_none_of_its_numbers(
    tiny_model: Path, tmp_path: Path, expected: list[Any]
) -> None:
    with waiting_engine(tmp_path, tiny_model) as (engine, backend):
        ada, bob = Caller(engine), Caller(engine, "bob", "t")
        run, other, loss_id = ada.create(), bob.create(), upload(ada)
        costly = ada.submit(costly_pass(run, 1, loss_id))
        step = ada.submit(optim_step(run, 2))
        assert backend.started.wait(60)
        requests = [forward_backward(other, 1), optim_step(other, 2)]
        requests += [
            SaveWeightsRequest(model_id=other, path="a", seq_id=3),
            sample(bob.sampler(base_model="tiny")),
        ]
        others = [bob.submit(request) for request in requests]
        backend.others.set()
        for request_id in others:
            assert not bob.outcome(request_id).error
        assert not ada.outcome(costly, OUTCOME_S).error
        assert not ada.outcome(step).error
        order = finish_order(engine, [costly, step, *others])
        assert order.index(costly) > order.index(others[0]), "it was cut"
        assert order.index(step) > order.index(costly), "nothing of its run overtakes it"
        assert backend.num_resumed > 1
        again = ada.create(1)
        backend.others.set()
        assert train(ada, again, loss_id) == expected


def test_a_run_that_shares_nothing_is_replayed_with_the_numbers_of_a_pass_that_was_cut(
    tiny_model: Path, tmp_path: Path, expected: list[Any]
) -> None:
    with waiting_engine(tmp_path, tiny_model) as (engine, backend):
        ada, bob = Caller(engine), Caller(engine, "bob", "t")
        run, other, loss_id = ada.create(), bob.create(), upload(ada)
        costly = ada.submit(costly_pass(run, 1, loss_id))
        assert backend.started.wait(60)
        steps = [bob.submit(forward_backward(other, number)) for number in range(1, 6)]
        backend.others.set()
        assert not ada.outcome(costly, OUTCOME_S).error
        for request_id in steps:
            assert not bob.outcome(request_id).error
    engine = Engine(config(tmp_path, tiny_model))
    engine.start()
    try:
        ada = Caller(engine)
        assert ada.run(optim_step(run, 2)) == expected[-1]
    finally:
        engine.close()


def test_a_worker_that_is_lost_between_two_slices_is_a_delay_with_the_same_numbers(
    tiny_model: Path, tmp_path: Path, expected: list[Any]
) -> None:
    engine, backend = crashing_engine(tmp_path, tiny_model)
    try:
        ada = Caller(engine)
        run, loss_id = ada.create(), upload(ada)
        backend.number = signal.SIGKILL
        backend.crashes = lambda call, _: call == "resume" and not backend.killed
        assert train(ada, run, loss_id) == expected
        assert len(backend.killed) == 1
    finally:
        engine.close()
