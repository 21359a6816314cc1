from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinkex._wire import json as wire_json
from tinkex._wire import proto as wire_proto
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.engine.store import Outcome, SessionRow
from tinkex.errors import Busy, EngineError, Expired, InvalidInput, UnknownObject, Unsupported
from tinkex.types import (
    AdamParams,
    CreateModelRequest,
    CreateSamplingSessionRequest,
    Datum,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    LoadWeightsRequest,
    LoraConfig,
    ModelInput,
    OptimStepRequest,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    UnloadModelRequest,
)

OWNER = "ada"
TOKENS = [5, 6, 7, 8, 9, 10]


class Caller:
    """Talks to an engine the way the API does, and waits for what it says."""

    def __init__(self, engine: Engine, owner: str = OWNER, session: str = "s") -> None:
        self.engine = engine
        self.owner = owner
        self.session = session
        if engine.store.sessions.get(session) is None:
            engine.store.sessions.add(SessionRow(session, owner, time.time(), time.time()))

    def outcome(self, request_id: str, timeout: float = 60.0) -> Outcome:
        outcome = asyncio.run(self.engine.wait(self.owner, request_id, timeout))
        assert outcome is not None, self.engine.queue_state(request_id)
        return outcome

    def submit(self, request: Any) -> str:
        return self.engine.submit(self.owner, request).request_id

    def run(self, request: Any) -> Any:
        outcome = self.outcome(self.submit(request))
        assert not outcome.error, outcome.error
        if isinstance(request, ForwardBackwardRequest):
            return wire_proto.decode_forward_backward_output(outcome.result)
        if isinstance(request, SampleRequest):
            return wire_proto.decode_sample_response(outcome.result, ["?"] * request.num_samples)
        return wire_json.decode_any(outcome.result)

    def create(self, number: int = 0, **lora: Any) -> str:
        request = CreateModelRequest(
            session_id=self.session,
            model_seq_id=number,
            base_model="tiny",
            lora_config=LoraConfig(**{"rank": 4, "seed": 1, **lora}),
        )
        model_id: str = self.run(request)["model_id"]
        return model_id

    def sampler(self, **weights: str) -> str:
        number = len(self.engine.store.samplers.of_session(self.session)) + 1000
        request = CreateSamplingSessionRequest(
            session_id=self.session, sampling_session_seq_id=number, **weights
        )
        return self.engine.admission.create_sampler(self.owner, request)

    def logprobs(self, sampler_id: str) -> list[float | None]:
        request = SampleRequest(
            prompt=ModelInput.from_ints(TOKENS),
            sampling_params=SamplingParams(max_tokens=1),
            sampling_session_id=sampler_id,
            prompt_logprobs=True,
        )
        response: SampleResponse = self.run(request)
        assert response.prompt_logprobs is not None
        return response.prompt_logprobs


def forward_backward(
    run: str, seq_id: int, *, forward_only: bool = False, **changes: Any
) -> ForwardBackwardRequest:
    data = [Datum(ModelInput.from_ints(TOKENS[:-1]), {"target_tokens": TOKENS[1:]})]
    values = {"data": data, "loss_fn": "cross_entropy", "forward_only": forward_only, **changes}
    return ForwardBackwardRequest(model_id=run, seq_id=seq_id, **values)


def optim_step(run: str, seq_id: int, learning_rate: float = 1e-2) -> OptimStepRequest:
    return OptimStepRequest(model_id=run, seq_id=seq_id, adam_params=AdamParams(learning_rate=learning_rate))


def sample(sampler: str | None, seq_id: int | None = None, **changes: Any) -> SampleRequest:
    values = {
        "prompt": ModelInput.from_ints(TOKENS),
        "sampling_params": SamplingParams(max_tokens=4, stop=[]),
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        **changes,
    }
    return SampleRequest(**values)


def config(home: Path, model: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(home=home, models={"tiny": str(model)}, **settings)


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    opened = Engine(config(tmp_path_factory.mktemp("home"), tiny_model))
    opened.start()
    yield opened
    opened.close()


@pytest.fixture
def ada(engine: Engine, request: pytest.FixtureRequest) -> Caller:
    return Caller(engine, session=f"s-{abs(hash(request.node.nodeid))}")


def test_training_lowers_the_loss(ada: Caller) -> None:
    run = ada.create()
    losses = []
    for step in range(4):
        output: ForwardBackwardOutput = ada.run(forward_backward(run, 2 * step + 1))
        ada.run(optim_step(run, 2 * step + 2))
        losses.append(output.metrics["loss:sum"])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_operations_that_arrive_backwards_run_forwards(ada: Caller) -> None:
    orderly, chaotic = ada.create(0), ada.create(1)
    operations = [forward_backward, optim_step, forward_backward, optim_step, forward_backward]
    first = [ada.run(make(orderly, n + 1)) for n, make in enumerate(operations)]
    ids = {n: ada.submit(operations[n](chaotic, n + 1)) for n in reversed(range(5))}
    last = wire_proto.decode_forward_backward_output(ada.outcome(ids[4]).result)
    assert last.metrics["loss:sum"] == pytest.approx(first[4].metrics["loss:sum"], rel=1e-5)


def test_the_same_number_again_gives_the_same_request(ada: Caller) -> None:
    run = ada.create()
    once, again = (ada.submit(forward_backward(run, 1)) for _ in range(2))
    assert once == again
    with pytest.raises(InvalidInput, match="other content"):
        ada.submit(forward_backward(run, 1, loss_fn="ppo"))
    ada.outcome(once)
    assert ada.submit(forward_backward(run, 1)) == once
    step = ada.submit(optim_step(run, 2))
    assert ada.submit(optim_step(run, 2)) == step
    with pytest.raises(InvalidInput, match="other content"):
        ada.submit(optim_step(run, 2, learning_rate=1.0))


def test_creating_a_run_again_gives_the_same_one(ada: Caller) -> None:
    assert ada.create() == ada.create()
    with pytest.raises(InvalidInput, match="other content"):
        ada.create(rank=8)


def test_a_rejected_operation_uses_up_its_number_and_changes_nothing(ada: Caller) -> None:
    run = ada.create()
    before = ada.run(forward_backward(run, 1, forward_only=True)).metrics["loss:sum"]
    wrong = [Datum(ModelInput.from_ints([5, 10**6]), {"target_tokens": [6, 7]})]
    for _ in range(2):
        with pytest.raises(InvalidInput, match="1000000"):
            ada.submit(forward_backward(run, 2, data=wrong))
    with pytest.raises(InvalidInput, match="used up"):
        ada.submit(forward_backward(run, 2))
    assert ada.run(forward_backward(run, 3, forward_only=True)).metrics["loss:sum"] == before


def test_operations_sent_before_the_run_exists_wait_for_it(ada: Caller) -> None:
    create = CreateModelRequest(
        session_id=ada.session, model_seq_id=0, base_model="tiny", lora_config=LoraConfig(rank=2)
    )
    submitted = ada.engine.submit(ada.owner, create)
    assert submitted.model_id is not None
    assert ada.run(forward_backward(submitted.model_id, 1)).metrics["loss:sum"] > 0


def test_a_failed_creation_fails_what_waits_for_it(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    engine = Engine(config(tmp_path, broken))
    engine.start()
    try:
        ada = Caller(engine)
        create = CreateModelRequest(
            session_id="s", model_seq_id=0, base_model="tiny", lora_config=LoraConfig(rank=2)
        )
        submitted = engine.submit(OWNER, create)
        assert submitted.model_id is not None
        outcome = ada.outcome(submitted.request_id)
        assert "cannot be loaded" in outcome.error
        with pytest.raises(Expired, match="never created"):
            ada.submit(optim_step(submitted.model_id, 1))
        waiting = ada.outcome(ada.submit(sample(ada.sampler(base_model="tiny"))))
        assert waiting.category == "server"
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (CreateModelRequest(session_id="?", model_seq_id=9, base_model="tiny"), "lora_config"),
        (
            CreateModelRequest(
                session_id="?",
                model_seq_id=9,
                base_model="tiny",
                lora_config=LoraConfig(rank=2),
                optimizer_config={"type": "dimuon"},
            ),
            "dimuon",
        ),
        (
            CreateModelRequest(
                session_id="?", model_seq_id=9, base_model="nobody/has", lora_config=LoraConfig(rank=2)
            ),
            "tiny",
        ),
        (LoadWeightsRequest(path="tinker://x/weights/y", optimizer=True), "model_id"),
        (LoadWeightsRequest(session_id="?", model_seq_id=9, path="tinker://x/weights/y"), "no checkpoint"),
        (LoadWeightsRequest(session_id="?", model_seq_id=9, path="tinker://x/y"), "not a checkpoint path"),
        (sample(None), "base_model or a model_path"),
        (sample("s:sample:77"), "no sampling session"),
        (sample(None, base_model="tiny", record_stability_info=True), "record_stability_info"),
        (sample(None, base_model="tiny", num_samples=0), "num_samples"),
        (sample(None, base_model="tiny", num_samples=10**6), "num_samples"),
    ],
)
def test_what_cannot_work_is_rejected_with_a_reason(ada: Caller, request_: Any, message: str) -> None:
    import msgspec

    if getattr(request_, "session_id", None) == "?":
        request_ = msgspec.structs.replace(request_, session_id=ada.session)
    with pytest.raises(EngineError, match=message):
        ada.submit(request_)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: OptimStepRequest(model_id=run, seq_id=1), "adam_params"),
        (lambda run: OptimStepRequest(model_id=run, seq_id=1, optimizer_params={"type": "dimuon"}), "dimuon"),
        (lambda run: SaveWeightsRequest(model_id=run, seq_id=1), "name"),
        (
            lambda run: SaveWeightsRequest(model_id=run, seq_id=1, path="../../x"),
            "not a valid checkpoint name",
        ),
        (lambda run: SaveWeightsRequest(model_id=run, seq_id=1, path="x", ttl_seconds=0), "ttl_seconds"),
        (lambda run: SaveWeightsForSamplerRequest(model_id=run, seq_id=1), "sampling_session_seq_id"),
        (
            lambda run: SaveWeightsForSamplerRequest(
                model_id=run, seq_id=1, sampling_session_seq_id=1, ttl_seconds=9
            ),
            "ttl_seconds",
        ),
        (
            lambda run: LoadWeightsRequest(model_id=run, seq_id=1, path="tinker://x/weights/y"),
            "no checkpoint",
        ),
        (
            lambda run: SaveWeightsExternalRequest(
                model_id=run, seq_id=1, path="x", age_encryption_recipients=["nobody"]
            ),
            "nobody",
        ),
        (lambda run: SaveWeightsExternalRequest(model_id=run, seq_id=1, path="../x"), "name"),
    ],
)
def test_an_operation_that_cannot_work_is_rejected_and_the_run_continues(
    ada: Caller, change: Any, message: str
) -> None:
    run = ada.create()
    with pytest.raises(EngineError, match=message):
        ada.submit(change(run))
    ada.run(forward_backward(run, 2))


def test_an_optimizer_that_is_not_offered_is_rejected_with_an_error_that_names_it(ada: Caller) -> None:
    run = ada.create()
    with pytest.raises(Unsupported, match="dimuon"):
        ada.submit(OptimStepRequest(model_id=run, seq_id=1, optimizer_params={"type": "dimuon"}))


@pytest.mark.slow
def test_a_gap_fails_those_who_wait_and_the_run_continues(tiny_model: Path, tmp_path: Path) -> None:
    engine = Engine(config(tmp_path, tiny_model, gap_timeout_s=0.3))
    engine.start()
    try:
        ada = Caller(engine)
        run = ada.create()
        outcome = ada.outcome(ada.submit(optim_step(run, 3)))
        assert "waited for operation 1" in outcome.error
        assert outcome.category == "server"
        ada.run(forward_backward(run, 4))
    finally:
        engine.close()


@pytest.mark.slow
def test_saving_and_loading_gives_the_same_next_loss(ada: Caller) -> None:
    run = ada.create()
    ada.run(forward_backward(run, 1))
    ada.run(optim_step(run, 2))
    saved = ada.run(SaveWeightsRequest(model_id=run, seq_id=3, path="step-1"))
    assert saved["path"] == f"tinker://{run}/weights/step-1"
    expected = [
        ada.run(forward_backward(run, 4)),
        ada.run(optim_step(run, 5)),
        ada.run(forward_backward(run, 6)),
    ]
    by_session = LoadWeightsRequest(
        session_id=ada.session, model_seq_id=7, path=saved["path"], optimizer=True
    )
    assert ada.run(by_session)["model_id"] == f"{ada.session}:train:7"
    other = ada.create(8, seed=2)
    ada.run(LoadWeightsRequest(model_id=other, seq_id=1, path=saved["path"], optimizer=True))
    for resumed, first in ((f"{ada.session}:train:7", 1), (other, 2)):
        again = [
            ada.run(forward_backward(resumed, first)),
            ada.run(optim_step(resumed, first + 1)),
            ada.run(forward_backward(resumed, first + 2)),
        ]
        for mine, theirs in ((again[0], expected[0]), (again[2], expected[2])):
            assert mine.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=1e-6)


def test_a_checkpoint_is_replaced_only_with_overwrite(ada: Caller) -> None:
    run = ada.create()
    ada.run(SaveWeightsRequest(model_id=run, seq_id=1, path="same"))
    with pytest.raises(InvalidInput, match="overwrite=True"):
        ada.submit(SaveWeightsRequest(model_id=run, seq_id=2, path="same"))
    ada.run(SaveWeightsRequest(model_id=run, seq_id=3, path="same", overwrite=True))
    (row,) = ada.engine.store.checkpoints.of_run(run, time.time())
    directory = ada.engine.store.directories.resolve(row.directory)
    assert (directory / "adapter_config.json").is_file()
    assert len(list(directory.parent.iterdir())) == 1


def test_a_checkpoint_of_another_shape_is_rejected_when_loaded(ada: Caller) -> None:
    small, large = ada.create(0, rank=2), ada.create(1, rank=8)
    path = ada.run(SaveWeightsRequest(model_id=small, seq_id=1, path="small"))["path"]
    outcome = ada.outcome(ada.submit(LoadWeightsRequest(model_id=large, seq_id=1, path=path)))
    assert "rank" in outcome.error
    assert outcome.category == "user"
    ada.run(forward_backward(large, 2))


def test_weights_without_optimizer_cannot_be_loaded_with_it(ada: Caller) -> None:
    run = ada.create()
    path = ada.run(SaveWeightsForSamplerRequest(model_id=run, seq_id=1, path="only-weights"))["path"]
    with pytest.raises(InvalidInput, match="optimizer"):
        ada.submit(LoadWeightsRequest(model_id=run, seq_id=2, path=path, optimizer=True))
    ada.run(LoadWeightsRequest(model_id=run, seq_id=3, path=path))


def test_an_expired_checkpoint_is_rejected_with_its_date(ada: Caller) -> None:
    run = ada.create()
    path = ada.run(SaveWeightsRequest(model_id=run, seq_id=1, path="brief", ttl_seconds=3600))["path"]
    (row,) = ada.engine.store.checkpoints.of_run(run, time.time())
    ada.engine.store.checkpoints.set_expiry(row, time.time() - 1)
    with pytest.raises(Expired, match=r"expired on \d{4}-"):
        ada.submit(LoadWeightsRequest(model_id=run, seq_id=2, path=path))
    ada.run(SaveWeightsRequest(model_id=run, seq_id=3, path="brief"))


def test_a_sampler_keeps_its_weights_while_training_continues(ada: Caller) -> None:
    run = ada.create()
    ada.run(forward_backward(run, 1))
    ada.run(optim_step(run, 2))
    snapshot = SaveWeightsForSamplerRequest(model_id=run, seq_id=3, sampling_session_seq_id=0)
    sampler = ada.run(snapshot)["sampling_session_id"]
    assert sampler == f"{ada.session}:sample:0"
    before = ada.logprobs(sampler)
    trained = ada.run(forward_backward(run, 4, forward_only=True)).loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(np.array(before[1:], dtype=np.float32), trained, atol=1e-4)
    ada.run(forward_backward(run, 5))
    ada.run(optim_step(run, 6, learning_rate=0.1))
    assert ada.logprobs(sampler) == before
    later = SaveWeightsForSamplerRequest(model_id=run, seq_id=7, path="named")
    assert ada.logprobs(ada.sampler(model_path=ada.run(later)["path"])) != before


def test_a_retried_unnamed_snapshot_keeps_its_first_sampler(ada: Caller) -> None:
    run = ada.create()
    first = SaveWeightsForSamplerRequest(model_id=run, seq_id=1, sampling_session_seq_id=0)
    retried = SaveWeightsForSamplerRequest(model_id=run, seq_id=1, sampling_session_seq_id=1)
    assert ada.submit(first) == ada.submit(retried)
    assert ada.run(retried)["sampling_session_id"] == f"{ada.session}:sample:0"


def test_snapshots_of_unchanged_weights_share_a_directory(ada: Caller) -> None:
    run = ada.create()
    for n in range(3):
        ada.run(SaveWeightsForSamplerRequest(model_id=run, seq_id=n + 1, sampling_session_seq_id=n))
    ada.run(forward_backward(run, 4))
    ada.run(optim_step(run, 5))
    ada.run(SaveWeightsForSamplerRequest(model_id=run, seq_id=6, sampling_session_seq_id=3))
    samplers = ada.engine.store.samplers.of_session(ada.session)
    assert len({row.directory for row in samplers}) == 2


def test_snapshots_evicted_from_memory_are_read_again(tiny_model: Path, tmp_path: Path) -> None:
    engine = Engine(config(tmp_path, tiny_model, snapshots_in_memory=1))
    engine.start()
    try:
        ada = Caller(engine)
        run, samplers, expected = ada.create(), [], []
        for n in range(3):
            ada.run(forward_backward(run, 3 * n + 1))
            ada.run(optim_step(run, 3 * n + 2))
            save = SaveWeightsForSamplerRequest(model_id=run, seq_id=3 * n + 3, sampling_session_seq_id=n)
            samplers.append(ada.run(save)["sampling_session_id"])
            expected.append(ada.logprobs(samplers[-1]))
        assert expected[0] != expected[1]
        for sampler, logprobs in zip(samplers, expected, strict=True):
            np.testing.assert_allclose(
                np.array(ada.logprobs(sampler)[1:], float), np.array(logprobs[1:], float), atol=1e-6
            )
    finally:
        engine.close()


def test_samples_come_back_with_one_sequence_per_id(ada: Caller) -> None:
    sampler = ada.sampler(base_model="tiny")
    submitted = ada.engine.submit(OWNER, sample(sampler, 0, num_samples=3))
    ids = submitted.sample_sequence_ids
    assert ids is not None
    assert len(set(ids)) == 3
    response = wire_proto.decode_sample_response(ada.outcome(submitted.request_id).result, ids)
    assert [len(s.tokens) for s in response.sequences] == [4, 4, 4]
    again = ada.engine.submit(OWNER, sample(sampler, 0, num_samples=3))
    assert again == submitted
    with pytest.raises(InvalidInput, match="other content"):
        ada.submit(sample(sampler, 0, num_samples=2))


def test_samples_may_name_their_weights_themselves(ada: Caller) -> None:
    run = ada.create()
    path = ada.run(SaveWeightsForSamplerRequest(model_id=run, seq_id=1, path="direct"))["path"]
    for weights in ({"base_model": "tiny"}, {"model_path": path}):
        assert len(ada.run(sample(None, **weights)).sequences) == 1


@pytest.mark.slow
def test_a_cancelled_sample_ends_as_cancelled(ada: Caller) -> None:
    sampler = ada.sampler(base_model="tiny")
    long = SamplingParams(max_tokens=400, stop=[])
    ids = [ada.submit(sample(sampler, n, sampling_params=long)) for n in range(100)]
    for request_id in ids:
        ada.engine.cancel(OWNER, request_id)
    outcomes = [ada.outcome(request_id) for request_id in ids]
    assert any("cancelled" in outcome.error for outcome in outcomes)
    ada.run(sample(sampler, 200))


def test_training_and_sampling_continue_side_by_side(ada: Caller) -> None:
    run, sampler = ada.create(), ada.sampler(base_model="tiny")
    long = SamplingParams(max_tokens=100, stop=[])
    samples = [ada.submit(sample(sampler, n, sampling_params=long)) for n in range(8)]
    steps = [ada.submit(make(run, n)) for n, make in enumerate([forward_backward, optim_step] * 5, start=1)]
    for request_id in [*steps, *samples]:
        assert not ada.outcome(request_id).error


def test_things_of_another_user_do_not_exist(engine: Engine, ada: Caller) -> None:
    bob = Caller(engine, owner="bob", session=f"bob-{ada.session}")
    run = ada.create()
    path = ada.run(SaveWeightsForSamplerRequest(model_id=run, seq_id=1, path="private"))["path"]
    sampler = ada.sampler(model_path=path)
    request_id = ada.submit(sample(sampler, 0))
    ada.outcome(request_id)
    with pytest.raises(UnknownObject):
        bob.submit(optim_step(run, 2))
    with pytest.raises(UnknownObject):
        bob.submit(sample(sampler, 1))
    with pytest.raises(UnknownObject):
        bob.submit(sample(None, model_path=path))
    with pytest.raises(UnknownObject):
        bob.submit(LoadWeightsRequest(session_id=bob.session, model_seq_id=0, path=path))
    with pytest.raises(UnknownObject):
        asyncio.run(engine.wait("bob", request_id, 1.0))
    with pytest.raises(UnknownObject):
        engine.cancel("bob", request_id)
    (row,) = engine.store.checkpoints.of_run(run, time.time())
    engine.store.checkpoints.set_public(row, public=True)
    bob.run(sample(None, model_path=path))


def test_an_unloaded_run_says_how_to_continue(ada: Caller) -> None:
    run = ada.create()
    path = ada.run(SaveWeightsRequest(model_id=run, seq_id=1, path="last"))["path"]
    ada.run(UnloadModelRequest(model_id=run))
    with pytest.raises(Expired, match=path):
        ada.submit(optim_step(run, 2))


@pytest.mark.slow
def test_after_a_restart_results_samplers_and_runs_are_there(tiny_model: Path, tmp_path: Path) -> None:
    engine = Engine(config(tmp_path, tiny_model))
    engine.start()
    ada = Caller(engine)
    run = ada.create()
    step = ada.submit(forward_backward(run, 1))
    loss = ada.outcome(step)
    ada.run(SaveWeightsRequest(model_id=run, seq_id=2, path="before"))
    sampler = ada.run(SaveWeightsForSamplerRequest(model_id=run, seq_id=3, sampling_session_seq_id=0))
    logprobs = ada.logprobs(sampler["sampling_session_id"])
    waiting = ada.submit(optim_step(run, 5))
    engine.close()

    again = Engine(config(tmp_path, tiny_model))
    accepted = again.submit(OWNER, sample(sampler["sampling_session_id"], 5)).request_id
    again.close()  # never started: the sample stays accepted

    engine = Engine(config(tmp_path, tiny_model))
    engine.start()
    try:
        ada = Caller(engine)
        assert ada.outcome(step) == loss
        ada.run(optim_step(run, 4))
        assert b'"step:unique":2' in ada.outcome(waiting).result
        row = engine.store.runs.get(run)
        assert row is not None
        assert row.status == "live"
        assert not ada.outcome(accepted).error
        np.testing.assert_allclose(
            np.array(ada.logprobs(sampler["sampling_session_id"])[1:], float),
            np.array(logprobs[1:], float),
            atol=1e-6,
        )
    finally:
        engine.close()


@pytest.mark.slow
def test_sessions_that_are_over_release_what_they_held(tiny_model: Path, tmp_path: Path) -> None:
    engine = Engine(config(tmp_path, tiny_model, maintenance_interval_s=0.05, session_grace_s=0.0))
    engine.start()
    try:
        ada = Caller(engine)
        run = ada.create()
        ada.run(SaveWeightsForSamplerRequest(model_id=run, seq_id=1, sampling_session_seq_id=0))
        sampler = f"{ada.session}:sample:0"
        ada.logprobs(sampler)
        engine.store.sessions.finish(ada.session, time.time() - 1, "success", None)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            row = engine.store.samplers.get(sampler)
            assert row is not None
            if row.released_at is not None and not list((tmp_path / "engine" / "snapshots").iterdir()):
                break
            time.sleep(0.02)
        with pytest.raises(Expired, match="session is over"):
            ada.submit(optim_step(run, 2))
        with pytest.raises(Expired, match="its session ended"):
            ada.submit(sample(sampler, 1))
        assert list((tmp_path / "engine" / "snapshots").iterdir()) == []
    finally:
        engine.close()


def test_too_much_simultaneously_is_rejected_for_now_and_the_number_stays_free(
    tiny_model: Path, tmp_path: Path
) -> None:
    engine = Engine(config(tmp_path, tiny_model, max_pending_operations=2, max_live_runs_per_user=1))
    engine.start()
    try:
        ada = Caller(engine)
        run = ada.create()
        with pytest.raises(Busy, match="unload"):
            ada.create(1)
        waiting = [ada.submit(optim_step(run, seq_id)) for seq_id in (2, 3)]
        for rejected in (
            optim_step(run, 4),
            forward_backward(run, 5),
            sample(ada.sampler(base_model="tiny")),
        ):
            with pytest.raises(Busy, match="waiting already"):
                ada.submit(rejected)
        assert ada.submit(optim_step(run, 3)) == waiting[1], "what was accepted is answered as before"
        bob = Caller(engine, owner="bob", session="b")
        bob.run(sample(bob.sampler(base_model="tiny")))
        assert engine.queue_state(waiting[0]).reason.startswith("waits for operation 1")
        # What the others wait for is taken, or they would wait for ever.
        for accepted in (ada.submit(forward_backward(run, 1)), *waiting):
            assert not ada.outcome(accepted).error
        ada.run(optim_step(run, 4))
    finally:
        engine.close()


def test_a_rank_beyond_the_limit_is_rejected(ada: Caller) -> None:
    ada.create()
    with pytest.raises(InvalidInput, match="rank is 4096"):
        ada.create(1, rank=4096)


def test_a_deleted_checkpoint_is_gone_from_disk_and_its_sampler_says_so(ada: Caller) -> None:
    run = ada.create()
    path = ada.run(SaveWeightsForSamplerRequest(model_id=run, seq_id=1, path="gone"))["path"]
    sampler = ada.sampler(model_path=path)
    (row,) = ada.engine.store.checkpoints.of_run(run, time.time())
    ada.engine.delete_checkpoint(row)
    outcome = ada.outcome(ada.submit(sample(sampler, 0)))
    assert "deleted" in outcome.error
    assert outcome.category == "user"
    assert not ada.engine.store.directories.resolve(row.directory).exists()


def test_names_of_one_source_share_one_model(tiny_model: Path, tmp_path: Path) -> None:
    names = {"Qwen/Qwen3-8B": str(tiny_model), "other": f"{tiny_model}/"}
    engine = Engine(EngineConfig(home=tmp_path, models=names))
    try:
        assert len(engine.models.all) == 1
        assert engine.models.find("Qwen/Qwen3-8B:peft:262144") is engine.models.find("other")
        assert engine.models.find(str(tiny_model)) is engine.models.all[0]
        with pytest.raises(UnknownObject, match="Qwen/Qwen3-8B, other"):
            engine.models.find("another")
        with pytest.raises(UnknownObject):
            engine.models.find("~nobody/" + "x" * 5000)
    finally:
        engine.close()


def test_waiting_ends_when_the_engine_closes(tiny_model: Path, tmp_path: Path) -> None:
    engine = Engine(config(tmp_path, tiny_model))
    engine.start()
    ada = Caller(engine)
    run = ada.create()
    request_id = ada.submit(optim_step(run, 2))

    async def wait() -> Outcome | None:
        task = asyncio.ensure_future(engine.wait(OWNER, request_id, 60.0))
        while not engine.stats().polls:  # noqa: ASYNC110 -- set by another task of this loop
            await asyncio.sleep(0)
        engine.end_waits()
        return await task

    assert asyncio.run(wait()) is None
    assert "operation 1" in engine.queue_state(request_id).reason
    engine.close()
    engine.close()
