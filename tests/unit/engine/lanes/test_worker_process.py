"""The worker process: the same results as on a thread; its crash does not affect the engine, and it never outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from safetensors.numpy import load_file

from tests.unit.engine.lanes.crashing import crashing_engine
from tests.unit.engine.test_engine import Caller, config, forward_backward, optim_step, sample
from tinkex._wire import proto as wire_proto
from tinkex.engine.durability.replay import same_result
from tinkex.engine.engine import Engine
from tinkex.engine.lanes.interface import WorkerLost
from tinkex.engine.lanes.remote import Callbacks
from tinkex.engine.lanes.worker_process import ProcessBackend
from tinkex.engine.running.feeds import StreamedToken, TokenFeed
from tinkex.engine.store import Outcome
from tinkex.errors import InvalidInput, OverQuota
from tinkex.types import (
    CreateCustomLossRequest,
    Datum,
    ForwardBackwardRequest,
    LoadWeightsRequest,
    ModelInput,
    SamplingParams,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0


ALIKE: dict[str, Any] = {"savepoint_after_operations": 4, "threads": 2}
"""The last bits depend on the number of threads, and other tests change it in this process."""


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with a worker process that writes a savepoint every few operations."""
    home = tmp_path_factory.mktemp("worker")
    opened = Engine(config(home, tiny_model, worker="process", **ALIKE))
    opened.start()
    opened.load_models().result(PATIENCE_S)
    yield opened
    worker = opened.backend.status
    opened.close()
    assert worker is not None
    assert worker.pid is None or not psutil.pid_exists(worker.pid)


@pytest.fixture(scope="module")
def quiet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The same on a thread, to compare with."""
    opened = Engine(config(tmp_path_factory.mktemp("thread"), tiny_model, **ALIKE))
    opened.start()
    yield opened
    opened.close()


def pid(engine: Engine) -> int:
    status = engine.backend.status
    assert status is not None
    assert status.pid is not None
    return status.pid


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def operations(run: str) -> Sequence[Any]:
    """One operation of each kind; the last one loads a checkpoint saved by an earlier one."""
    path = f"tinker://{run}/weights/kept"
    return [
        forward_backward(run, 1),
        optim_step(run, 2),
        SaveWeightsRequest(model_id=run, seq_id=3, path="kept"),
        forward_backward(run, 4),
        optim_step(run, 5),
        SaveWeightsForSamplerRequest(model_id=run, seq_id=6, path="sampled"),
        LoadWeightsRequest(model_id=run, seq_id=7, path=path, optimizer=True),
        forward_backward(run, 8),
        optim_step(run, 9),
        forward_backward(run, 10, forward_only=True),
        SaveWeightsRequest(model_id=run, seq_id=11, path="end"),
    ]


def saved(engine: Engine, run: str, name: str) -> dict[str, bytes]:
    """The tensors of a checkpoint, to the last bit."""
    directory = engine.store.root / "checkpoints" / run.replace(":", "~") / "weights" / name
    tensors = {
        f"{file.name} {key}": value
        for file in directory.glob("*.safetensors")
        for key, value in load_file(file).items()
    }
    return {name: bytes(value.tobytes()) for name, value in tensors.items()}


def run_in_the_middle(engine: Engine, ada: Caller, operation: Any, number: signal.Signals) -> Outcome:
    """The outcome of an operation during which the worker got a signal."""
    # A suspended worker processes nothing, so the operation is in flight when the signal arrives.
    worker = pid(engine)
    os.kill(worker, signal.SIGSTOP)
    request_id = ada.submit(operation)
    wait_until(lambda: engine.queue_state(request_id).reason == "running now")
    os.kill(worker, number)
    os.kill(worker, signal.SIGCONT)
    return ada.outcome(request_id)


def test_operations_in_flight_when_the_worker_is_killed_run_again_with_the_same_result(
    engine: Engine, quiet: Engine
) -> None:
    undisturbed, ada = Caller(quiet, session="same"), Caller(engine, session="same")
    run = undisturbed.create()
    assert ada.create() == run
    for operation in operations(run):
        expected = undisturbed.outcome(undisturbed.submit(operation))
        if operation.seq_id in {1, 3, 7}:
            outcome = run_in_the_middle(engine, ada, operation, signal.SIGKILL)
        else:
            outcome = ada.outcome(ada.submit(operation))
        assert not outcome.error
        assert same_result(outcome, expected)
    assert saved(engine, run, "end") == saved(quiet, run, "end")
    assert any(name.startswith("optimizer") for name in saved(engine, run, "end"))
    names = [
        path.name for path in (engine.store.root / "checkpoints").rglob("*") if "unfinished" in path.name
    ]
    assert not names, "an interrupted save leaves no file"
    assert engine.health.status == "ok"


def test_a_sample_without_a_seed_is_repeated_with_the_same_tokens(engine: Engine) -> None:
    ada = Caller(engine, session="drawn")
    sampler = ada.sampler(base_model="tiny")
    wanted = sample(sampler, sampling_params=SamplingParams(max_tokens=40, stop=[]), num_samples=2)
    feeds: list[list[tuple[int, int]]] = []

    async def watched() -> None:
        feed = TokenFeed()
        with engine.paused():
            request_id = (await engine.accept(ada.owner, wanted)).request_id
            engine.watch(request_id, feed)
        seen: list[StreamedToken] = []
        while len(seen) < 10:
            await feed.changed()
            seen += feed.read()
        os.kill(pid(engine), signal.SIGKILL)
        while (outcome := await engine.wait(ada.owner, request_id, PATIENCE_S)) is None:
            pass
        response = wire_proto.decode_sample_response(outcome.result, ["?"] * 2)
        seen += feed.read()
        for number, sequence in enumerate(response.sequences):
            tokens = [each.token for each in seen if each.sample == number]
            assert [each.index for each in seen if each.sample == number] == list(range(len(tokens)))
            assert tokens == list(sequence.tokens)[: len(tokens)]
        feeds.append([(each.sample, each.index) for each in seen])

    asyncio.run(watched())
    assert len(set(feeds[0])) == len(feeds[0]) >= 10, "no token is sent twice"


def test_an_operation_that_crashes_the_worker_every_time_fails_alone(
    tiny_model: Path, tmp_path: Path
) -> None:
    engine, backend = crashing_engine(tmp_path, tiny_model, **ALIKE)
    try:
        ada = Caller(engine)
        poisonous, healthy = ada.create(0), ada.create(1)
        backend.crashes = lambda call, runs: call == "pass" and poisonous in runs
        with engine.paused():  # so that both are queued, and share a pass
            poison = ada.submit(forward_backward(poisonous, 1))
            other = ada.submit(forward_backward(healthy, 1))
            after = ada.submit(optim_step(poisonous, 2))
        outcome = ada.outcome(poison)
        assert "lost every time" in outcome.error
        assert "SIGSEGV" in outcome.error
        assert len(backend.killed) == 3
        assert not ada.outcome(other).error
        assert not ada.outcome(after).error
        assert backend.status.state == "running"
    finally:
        engine.close()


def uploaded(caller: Caller, number: int, *constants: float) -> str:
    """The id of a custom loss; other constants make it another one."""
    total = {"op": "call_method", "name": "n0", "target": "sum", "args": [{"ref": "logprobs"}], "kwargs": {}}
    steps = [
        {
            **total,
            "op": "call_function",
            "name": f"n{n}",
            "target": "operator.mul",
            "args": [{"ref": f"n{n - 1}"}, each],
        }
        for n, each in enumerate(constants, 1)
    ]
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},
        *(total, *steps),
        {
            "op": "output",
            "name": "output",
            "target": "output",
            "kwargs": {},
            "args": [{"tuple": [{"ref": f"n{len(constants)}"}, {"dict": {}}]}],
        },
    ]
    request = {
        "session_id": caller.session,
        "custom_loss_seq_id": number,
        "name": f"loss {number}",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"format": 1, "nodes": nodes},
    }
    caller.submit(msgspec.convert(request, CreateCustomLossRequest))
    return f"{caller.session}:loss:{number}"


def custom_pass(run: str, seq_id: int, loss_id: str) -> ForwardBackwardRequest:
    return forward_backward(run, seq_id, loss_fn="custom", loss_fn_config={"loss_id": loss_id})


def test_a_loss_that_crashes_the_worker_is_quarantined_and_only_its_user_waits(
    tiny_model: Path, tmp_path: Path
) -> None:
    engine, backend = crashing_engine(tmp_path, tiny_model, **ALIKE)
    try:
        ada, bob = Caller(engine), Caller(engine, owner="bob", session="bob")
        first, second, third, healthy = *(ada.create(number) for number in range(3)), bob.create()
        poison, same, other = uploaded(ada, 0, 2.0), uploaded(ada, 1, 2.0), uploaded(ada, 2, 3.0)
        backend.crashes = lambda call, runs: call == "pass" and first in runs
        with engine.paused():
            crashing = ada.submit(custom_pass(first, 1, poison))
            queued = ada.submit(custom_pass(second, 1, same))
        wait_until(lambda: bool(backend.killed))
        # While ada waits, bob does not.
        assert bob.run(forward_backward(healthy, 1)).metrics["loss:sum"] > 0
        assert "lost every time" in ada.outcome(crashing).error
        assert len(backend.killed) == 2
        assert "this custom loss is quarantined" in ada.outcome(queued).error
        wait_until(lambda: accepts(ada, optim_step(second, 2)))
        for seq_id, loss in ((3, poison), (4, same)):
            with pytest.raises(InvalidInput, match="this custom loss is quarantined"):
                ada.submit(custom_pass(second, seq_id, loss))
        assert not ada.outcome(ada.submit(custom_pass(second, 5, other))).error
        assert len(backend.killed) == 2
        # Another loss, and two more crashes: now ada waits for several seconds.
        backend.crashes = lambda call, runs: call == "pass" and third in runs
        assert "lost every time" in ada.outcome(ada.submit(custom_pass(third, 1, other))).error
        with pytest.raises(OverQuota, match="operations of yours have crashed the worker 4 times") as caught:
            ada.submit(optim_step(second, 6))
        assert caught.value.retry_after_s is not None
        assert bob.run(optim_step(healthy, 2))
    finally:
        engine.close()


def accepts(caller: Caller, request: Any) -> bool:
    """Whether an operation is accepted now."""
    try:
        caller.submit(request)
    except OverQuota:
        return False
    return True


def test_a_sample_that_crashes_the_worker_every_time_fails_alone(tiny_model: Path, tmp_path: Path) -> None:
    engine, backend = crashing_engine(tmp_path, tiny_model, **ALIKE)
    try:
        ada = Caller(engine)
        sampler = ada.sampler(base_model="tiny")
        params = SamplingParams(max_tokens=200, stop=[])
        with engine.paused():
            poison = ada.submit(sample(sampler, sampling_params=params))
            other = ada.submit(sample(sampler, sampling_params=params))
            backend.crashes = lambda call, batch: call == "decode" and poison in batch
        assert "lost every time" in ada.outcome(poison).error
        assert len(backend.killed) == 3
        assert not ada.outcome(other).error
    finally:
        engine.close()


def test_bad_input_is_rejected_immediately_while_there_is_no_worker(engine: Engine) -> None:
    ada = Caller(engine, session="rejected")
    run = ada.create()
    os.kill(pid(engine), signal.SIGKILL)
    bad = [Datum(ModelInput.from_ints([5, 6]), {"target_tokens": [6, 10**6]})]
    with pytest.raises(InvalidInput, match="token id 1000000"):
        ada.submit(forward_backward(run, 1, data=bad))
    with pytest.raises(InvalidInput, match="prompt token 1000000"):
        ada.submit(sample(ada.sampler(base_model="tiny"), prompt=ModelInput.from_ints([10**6])))
    assert not ada.outcome(ada.submit(optim_step(run, 2))).error


PROGRAM = """
import os, signal, sys
from pathlib import Path
from tests.unit.engine.lanes.crashing import crashing_engine
from tests.unit.engine.test_engine import Caller, config, forward_backward, optim_step, sample
from tinkex.engine.lanes.worker_process import ProcessBackend
from tinkex.engine.lanes.interface import WorkerLost
from tinkex.engine.engine import Engine
from tinkex.engine.api.app import build_app

engine = Engine(config(Path(sys.argv[1]), Path(sys.argv[2]), worker="process"))
build_app(engine)
engine.start()
ada = Caller(engine)
run = ada.create()
ada.run(forward_backward(run, 1))
ada.run(optim_step(run, 2))
ada.run(sample(ada.sampler(base_model="tiny")))
print(engine.models.all[0].tokenizer.decode([5]), "torch" in sys.modules, engine.backend.status.pid, flush=True)
os.kill(engine.backend.status.pid, signal.SIGSTOP)
engine.submit(ada.owner, forward_backward(run, 3))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_engine_with_a_worker_needs_no_torch_and_the_worker_does_not_outlive_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(tiny_model)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    _, torch_is_there, worker = ended.stdout.split()
    assert torch_is_there == "False"
    wait_until(lambda: not psutil.pid_exists(int(worker)))


def test_the_error_says_why_a_worker_exited(tiny_model: Path, tmp_path: Path) -> None:
    deaths = threading.Event()
    backend = ProcessBackend(
        config(tmp_path, tiny_model, worker="process"), Callbacks(None, deaths.set, print)
    )
    with pytest.raises(WorkerLost, match="was not started"):
        backend.check()
    for number, own_fault, reason in (
        (signal.SIGABRT, True, "SIGABRT"),
        (signal.SIGKILL, False, "SIGKILL from outside"),
    ):
        backend.start()
        status = backend.status
        assert status.pid is not None
        os.kill(status.pid, number)
        assert deaths.wait(PATIENCE_S)
        deaths.clear()
        assert backend.status.pid is None
        with pytest.raises(WorkerLost, match=reason) as died:
            backend.load(str(tiny_model))
        assert died.value.own_fault is own_fault
    assert backend.status.restarts == 1
    backend.close()
