"""The resilient loop on a real engine, and on a server that misbehaves by script."""

from __future__ import annotations

import asyncio
import io
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.unit.recovery.conftest import Events, Runs
from tinkex import Config, ServiceClient, errors, types
from tinkex.observability.events import CallbackFailed, RecoveryFailed, RunRecovered, RunUnhealthy
from tinkex.recovery import Best, RecoveryPolicy, TrainingStep
from tinkex.recovery.tracking import TrackedFuture
from tinkex.testing import LocalEngine, Reply, Request, local_engine, reply

QUICK = RecoveryPolicy(backoff_s=0.001, max_backoff_s=0.002, max_attempts=3)


def datum(n: int) -> types.Datum:
    return types.Datum(types.ModelInput.from_ints([n + 5, n + 6]), {"target_tokens": [n + 6, n + 7]})


def batch(n: int) -> list[types.Datum]:
    return [datum(n)]


def train(step: TrainingStep[Any]) -> dict[str, float]:
    passed = step.training.forward_backward(step.batch, "cross_entropy")
    step.training.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=60)
    return {"loss": passed.result(timeout=60).metrics["loss:sum"]}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[LocalEngine]:
    with local_engine(tiny_model) as running:
        yield running


@pytest.fixture
def real(engine: LocalEngine) -> Iterator[ServiceClient]:
    with engine.service() as client:
        yield client


def positions(service: ServiceClient, loop: Any) -> list[tuple[str, str]]:
    run = loop.training.model_id
    checkpoints = service.create_rest_client().list_checkpoints(run).result().checkpoints
    return sorted(
        (one.tinker_path.rpartition("/")[2], (one.user_metadata or {})["tinkex_step"]) for one in checkpoints
    )


# ---- on a real engine ----


@pytest.mark.slow
def test_checkpoints_are_saved_by_step_and_at_the_end_with_their_position(
    engine: LocalEngine, real: ServiceClient
) -> None:
    loop = tinkex.resilient_training(
        real, batch, steps=5, name="by-step", base_model=engine.base_model, rank=2, checkpoint_every=2
    )
    loop.run(train)
    assert positions(real, loop) == [(f"by-step-0000000{n}", str(n)) for n in (2, 4, 5)]
    assert (loop.position, loop.recoveries, loop.resumed_at) == (5, 0, None)
    assert loop.checkpoint == f"tinker://{loop.training.model_id}/weights/by-step-00000005"


@pytest.mark.slow
def test_checkpoints_are_saved_by_time(engine: LocalEngine, real: ServiceClient) -> None:
    loop = tinkex.resilient_training(
        real,
        [batch(0), batch(1)],
        name="by-time",
        base_model=engine.base_model,
        rank=2,
        checkpoint_every=None,
        checkpoint_every_s=1e-9,
    )
    loop.run(train)
    assert [position for _, position in positions(real, loop)] == ["1", "2"]


@pytest.mark.slow
def test_old_checkpoints_are_deleted_where_configured(engine: LocalEngine, real: ServiceClient) -> None:
    options: dict[str, Any] = {"base_model": engine.base_model, "rank": 2, "checkpoint_every": 1, "keep": 2}
    loop = tinkex.resilient_training(real, batch, steps=4, name="kept", **options)
    loop.run(train)
    assert [position for _, position in positions(real, loop)] == ["3", "4"]
    again = tinkex.resilient_training(real, batch, steps=5, name="kept", **options)
    again.run(train)
    assert again.resumed_at == 4
    assert [position for _, position in positions(real, again)] == ["5"]
    assert [position for _, position in positions(real, loop)] == ["4"]


@pytest.mark.slow
def test_a_name_is_taken_up_where_it_stands_and_can_start_over(
    engine: LocalEngine, real: ServiceClient
) -> None:
    options: dict[str, Any] = {"base_model": engine.base_model, "rank": 2, "checkpoint_every": 2}
    with pytest.raises(errors.RecoveryError, match="no training named 'again'"):
        tinkex.resilient_training(real, batch, steps=2, name="again", resume="must", **options).run(train)
    tinkex.resilient_training(real, batch, steps=2, name="again", **options).run(train)
    longer = tinkex.resilient_training(real, batch, steps=3, name="again", resume="must", **options)
    assert [step.index for step in drive(longer)] == [2]
    restarted = tinkex.resilient_training(real, batch, steps=2, name="again", resume="never", **options)
    assert [step.index for step in drive(restarted)] == [0, 1]
    after = tinkex.resilient_training(real, batch, steps=4, name="again", **options)
    assert [step.index for step in drive(after)] == [2, 3]  # of the latest start, not of the furthest


def drive(loop: Any, body: Callable[[TrainingStep[Any]], object] = train) -> Sequence[TrainingStep[Any]]:
    steps = []
    for step in loop:
        with step:
            body(step)
        steps.append(step)
    return steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "data", [lambda n: [batch(i) for i in range(n)], lambda n: iter([batch(i) for i in range(n)])]
)
def test_data_that_ends_before_the_training_stands_is_rejected_and_data_that_ends_there_is_done(
    engine: LocalEngine, real: ServiceClient, data: Any
) -> None:
    name = f"short-{secrets.token_hex(4)}"

    def over(count: int, **more: Any) -> Any:
        loop = tinkex.resilient_training(
            real, data(count), name=name, base_model=engine.base_model, rank=2, seed=1, **more
        )
        loop.run(train)
        return loop

    assert over(3).position == 3
    with pytest.raises(errors.RecoveryError, match=r"is at batch 3 .* the data has fewer"):
        over(2)
    done = over(3)
    assert (done.resumed_at, done.position) == (3, 3)
    assert over(2, resume="never").position == 2


class Unlucky:
    """Data that cannot be read at one place, the first time."""

    def __init__(self, at: int) -> None:
        self.at, self.failed = at, False

    def __call__(self, position: int) -> list[types.Datum]:
        if position == self.at and not self.failed:
            self.failed = True
            raise OSError("the disk with the data is gone")
        return batch(position)


@pytest.mark.slow
def test_data_that_raises_is_the_programs_own_error_and_the_next_program_continues(
    engine: LocalEngine, real: ServiceClient
) -> None:
    name, data = f"unlucky-{secrets.token_hex(4)}", Unlucky(3)

    def loop() -> Any:
        return tinkex.resilient_training(
            real, data, steps=5, name=name, base_model=engine.base_model, rank=2, seed=1, checkpoint_every=2
        )

    first = loop()
    with pytest.raises(OSError, match="the disk with the data"):
        first.run(train)
    assert (first.position, first.recoveries) == (3, 0)
    second = loop()
    second.run(train)
    assert (second.resumed_at, second.position) == (2, 5)


@pytest.mark.slow
async def test_the_async_form_does_the_same(engine: LocalEngine, real: ServiceClient) -> None:
    loop = tinkex.resilient_training(
        real, batch, steps=3, name="async", base_model=engine.base_model, rank=2, checkpoint_every=2
    )
    async for step in loop:
        async with step:
            passed = await step.training.forward_backward_async(step.batch, "cross_entropy")
            await (await step.training.optim_step_async(types.AdamParams()))
            step.report(loss=(await passed).metrics["loss:sum"])
    assert loop.position == 3
    assert [position for _, position in positions(real, loop)] == ["2", "3"]


@pytest.mark.slow
def test_it_can_begin_on_saved_weights(engine: LocalEngine, real: ServiceClient) -> None:
    first = real.create_lora_training_client(engine.base_model, rank=2)
    path = first.save_state("sft").result(timeout=60).path
    loop = tinkex.resilient_training(real, [batch(0)], name="from-saved", start_from=path)
    loop.run(train)
    assert loop.training.get_info().lora_rank == 2


def test_progress_is_shown(engine: LocalEngine, real: ServiceClient) -> None:
    with redirect_stderr(io.StringIO()) as shown:
        tinkex.resilient_training(
            real, batch, steps=3, name="shown", base_model=engine.base_model, rank=2, progress=True
        ).run(train)
    assert "step 3/3" in shown.getvalue()


@pytest.mark.slow
def test_a_users_own_error_is_his_and_the_checkpoint_stands(engine: LocalEngine, real: ServiceClient) -> None:
    options: dict[str, Any] = {"base_model": engine.base_model, "rank": 2, "checkpoint_every": 2}
    loop = tinkex.resilient_training(real, batch, steps=5, name="mine", **options)

    def fails(step: TrainingStep[Any]) -> None:
        train(step)
        if step.index == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        drive(loop, fails)
    again = tinkex.resilient_training(real, batch, steps=5, name="mine", **options)
    assert [step.index for step in drive(again)] == [2, 3, 4]


@pytest.mark.slow
async def test_a_program_may_say_that_it_is_enough(engine: LocalEngine, real: ServiceClient) -> None:
    options: dict[str, Any] = {"base_model": engine.base_model, "rank": 2, "checkpoint_every": 100}

    def until_the_third(step: TrainingStep[Any]) -> None:
        train(step)
        if step.index == 2:
            step.stop()

    loop = tinkex.resilient_training(real, batch, steps=9, name="enough", **options)
    assert [step.index for step in drive(loop, until_the_third)] == [0, 1, 2]
    assert [position for _, position in positions(real, loop)] == ["3"]
    again = tinkex.resilient_training(real, batch, steps=9, name="enough", **options)
    async for step in again:
        async with step:
            assert step.index == 3
            step.stop()
    assert (again.resumed_at, again.position) == (3, 4)
    assert [position for _, position in positions(real, again)] == ["4"]


BAD = types.Datum(types.ModelInput.from_ints([5, 6]), {"target_tokens": [6, 10**6]})


def test_a_rejected_batch_is_raised_before_a_checkpoint_counts_it(
    engine: LocalEngine, real: ServiceClient
) -> None:
    loop = tinkex.resilient_training(
        real, batch, steps=4, name="unseen", base_model=engine.base_model, rank=2, checkpoint_every=2
    )

    def careless(step: TrainingStep[Any]) -> None:
        step.training.forward_backward([BAD] if step.index == 3 else step.batch, "cross_entropy")
        step.training.optim_step(types.AdamParams())

    with pytest.raises(tinkex.TinkerError, match="1000000") as caught:
        drive(loop, careless)
    assert "raised by an operation of step 3" in caught.value.__notes__
    assert [position for _, position in positions(real, loop)] == ["2"]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_rejected_batch_that_the_program_has_dealt_with_is_its_own_business(
    engine: LocalEngine, real: ServiceClient, asynchronous: bool
) -> None:
    loop = tinkex.resilient_training(
        real,
        batch,
        steps=3,
        name=f"seen-{asynchronous}",
        base_model=engine.base_model,
        rank=2,
        checkpoint_every=1,
    )
    async for step in loop:
        async with step:
            if step.index == 1:
                rejected = step.training.forward_backward([BAD], "cross_entropy")
                with pytest.raises(tinkex.TinkerError, match="1000000"):
                    await rejected if asynchronous else rejected.result(timeout=60)
                continue
            await step.training.forward_backward(step.batch, "cross_entropy")
            await step.training.optim_step(types.AdamParams())
    assert (loop.position, loop.recoveries) == (3, 0)


def test_every_way_to_change_the_weights_is_kept_count_of(engine: LocalEngine, real: ServiceClient) -> None:
    def squared(data: Any, logprobs: Any) -> Any:
        return sum((lp**2).sum() for lp in logprobs), {}

    async def custom(step: TrainingStep[Any]) -> Any:
        return await step.training.forward_backward_custom_async(step.batch, squared)

    loop = tinkex.resilient_training(
        real, batch, steps=1, name="counted", base_model=engine.base_model, rank=2
    )
    for step in loop:
        with step:
            assert isinstance(step.training, tinkex.TrainingClient)
            operations = [
                step.training.forward_backward_custom(step.batch, squared),
                asyncio.run(custom(step)),
                step.training.forward_backward(step.batch, "cross_entropy"),
                step.training.optim_step(types.AdamParams()),
            ]
            assert all(isinstance(operation, TrackedFuture) for operation in operations)


# ---- Ctrl-C ----


def test_the_first_interrupt_waits_for_the_step_and_its_checkpoint(
    engine: LocalEngine, real: ServiceClient
) -> None:
    loop = tinkex.resilient_training(
        real, batch, steps=9, name="ctrl-c", base_model=engine.base_model, rank=2, checkpoint_every=100
    )

    def pressed_in_the_third(step: TrainingStep[Any]) -> None:
        if step.index == 2:
            os.kill(os.getpid(), signal.SIGINT)
        train(step)

    before = signal.getsignal(signal.SIGINT)
    with redirect_stderr(io.StringIO()) as said, pytest.raises(KeyboardInterrupt, match="step 3"):
        drive(loop, pressed_in_the_third)
    assert signal.getsignal(signal.SIGINT) is before
    assert "press Ctrl-C again" in said.getvalue()
    assert [position for _, position in positions(real, loop)] == ["3"]


def test_the_second_interrupt_stops_immediately(engine: LocalEngine, real: ServiceClient) -> None:
    loop = tinkex.resilient_training(
        real, batch, steps=9, name="ctrl-c-c", base_model=engine.base_model, rank=2, checkpoint_every=1
    )

    def pressed_twice_in_the_third(step: TrainingStep[Any]) -> None:
        train(step)
        if step.index == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            sys.stderr.flush()  # somewhere for the second one to arrive

    with redirect_stderr(io.StringIO()), pytest.raises(KeyboardInterrupt):
        drive(loop, pressed_twice_in_the_third)
    assert [position for _, position in positions(real, loop)] == ["1", "2"]  # not the step it broke off


# ---- on a server that misbehaves ----


class Misbehaving(Runs):
    """Lists what was saved, and loses runs by script."""

    def __init__(self) -> None:
        super().__init__()
        self.metadata: dict[str, dict[str, str]] = {}
        self.loses_at: list[int] = []
        self.pages = 0
        self.steps = 0

    def on_create_model(self, value: types.CreateModelRequest, request: Request) -> Reply:
        self.metadata[f"{value.session_id}:train:{value.model_seq_id}"] = value.user_metadata or {}
        return super().on_create_model(value, request)

    def on_save_weights(self, value: types.SaveWeightsRequest, request: Request) -> Reply:
        if value.model_id in self.gone:
            return reply({"detail": "gone"}, status=410)
        assert value.path is not None
        self.save(value.model_id, value.path, **(value.user_metadata or {}))
        return super().on_save_weights(value, request)

    def on_list_training_runs(self, value: Any, request: Request) -> Reply:
        self.pages += 1
        found = [
            {
                "training_run_id": run,
                "base_model": "toy",
                "model_owner": "me",
                "is_lora": True,
                "last_request_time": "2026-08-01T00:00:00Z",
                "user_metadata": self.metadata[run],
            }
            for run in self.metadata
        ]
        if self.pages % 2 == 0:
            found = []  # the page after the last
        return reply(
            {"training_runs": found, "cursor": {"offset": 0, "limit": 100, "total_count": len(found)}}
        )

    def on_list_checkpoints(self, value: Any, request: Request) -> Reply:
        run = request.path.split("/")[-2]
        return reply({"checkpoints": [one.model_dump(mode="json") for one in self.checkpoints.get(run, [])]})

    def on_optim_step(self, value: types.OptimStepRequest, request: Request) -> Reply:
        self.steps += 1
        if self.steps in self.loses_at:
            self.gone.add(value.model_id)
        if value.model_id in self.gone:
            return reply({"detail": f"run {value.model_id} is gone"}, status=410)
        return super().on_optim_step(value, request)


@pytest.fixture
def server() -> Misbehaving:
    return Misbehaving()


def walk(loop: Any) -> list[tuple[str, int]]:
    """The steps that went through, by run."""
    through = []
    for step in loop:
        with step:
            step.training.forward_backward(step.batch, "cross_entropy").result(timeout=20)
            step.training.optim_step(types.AdamParams()).result(timeout=20)
            step.report(loss=float(10 - step.index))
            through.append((step.training.model_id[-1], step.index))
    return through


def test_every_loss_of_a_run_is_survived_in_order(
    server: Misbehaving, service: ServiceClient, events: Events
) -> None:
    server.loses_at = [1, 4, 8]  # before any checkpoint, and twice after some
    reported = []
    policy = RecoveryPolicy(backoff_s=0.001, on_recovery=reported.append)
    loop = tinkex.resilient_training(
        service,
        iter([batch(n) for n in range(6)]),
        name="lost",
        base_model="toy",
        checkpoint_every=2,
        policy=policy,
        events=events,
    )
    assert walk(loop) == [
        ("1", 0), ("1", 1),  # run 0 was lost at step 0, run 1 at step 2, after its checkpoint
        ("2", 2), ("2", 3), ("2", 4),  # and run 2 at step 5, after the checkpoint of 4
        ("3", 4), ("3", 5),
    ]  # fmt: skip
    assert [one.checkpoint.rpartition("-")[2] for one in reported] == [
        "the beginning",
        "00000002",
        "00000004",
    ]
    assert loop.recoveries == 3 == len(events.of(RunRecovered))
    assert {event.condition for event in events.of(RunUnhealthy)} == {"lost"}
    assert [value.optimizer for value in server.values("load_weights")] == [True, True]


def test_a_run_lost_while_the_end_is_saved_repeats_the_last_steps(
    server: Misbehaving, service: ServiceClient
) -> None:
    lost = []

    def save(value: types.SaveWeightsRequest, request: Request) -> Reply:
        if value.path == "end-00000003" and not lost:
            lost.append(value.model_id)
            return reply({"detail": "gone"}, status=410)
        return server.on_save_weights(value, request)

    server.answers["save_weights"] = save
    loop = tinkex.resilient_training(
        service, batch, steps=3, name="end", base_model="toy", checkpoint_every=2, policy=QUICK
    )
    assert walk(loop) == [("0", 0), ("0", 1), ("0", 2), ("1", 2)]
    assert loop.checkpoint == "tinker://sess-1:train:1/weights/end-00000003"


def test_a_run_lost_in_the_last_requested_step_is_recovered(
    server: Misbehaving, service: ServiceClient
) -> None:
    server.loses_at = [2]
    loop = tinkex.resilient_training(service, batch, steps=9, name="enough", base_model="toy", policy=QUICK)

    def until_the_second(step: TrainingStep[Any]) -> None:
        if step.index == 1:
            step.stop()
        step.training.optim_step(types.AdamParams()).result(timeout=20)

    assert [step.index for step in drive(loop, until_the_second)] == [0, 1, 0, 1]
    assert loop.position == 2


def test_a_place_that_keeps_failing_is_given_up(
    server: Misbehaving, service: ServiceClient, events: Events
) -> None:
    server.loses_at = list(range(2, 100))
    reported = []
    policy = RecoveryPolicy(
        backoff_s=0.001, max_attempts=3, on_failure=lambda run_id, error: reported.append((run_id, error))
    )
    loop = tinkex.resilient_training(
        service,
        batch,
        steps=5,
        name="stuck",
        base_model="toy",
        checkpoint_every=1,
        policy=policy,
        events=events,
    )
    with pytest.raises(errors.RecoveryError, match="step 1 of 'stuck' failed 4 times") as caught:
        walk(loop)
    assert reported == [("sess-1:train:3", caught.value)]
    assert isinstance(caught.value.__cause__, errors.APIStatusError)


def test_a_restart_that_fails_is_tried_again_with_back_off(
    server: Misbehaving, service: ServiceClient, events: Events
) -> None:
    server.loses_at = [2]
    full = [503, 503]

    def load(value: types.LoadWeightsRequest, request: Request) -> Reply:
        if full:
            return reply({"detail": "full"}, status=full.pop())
        return server.on_load_weights(value, request)

    server.answers["load_weights"] = load
    loop = tinkex.resilient_training(
        service,
        batch,
        steps=3,
        name="full",
        base_model="toy",
        checkpoint_every=1,
        policy=QUICK,
        events=events,
    )
    assert [index for _, index in walk(loop)] == [0, 1, 2]
    assert [event.attempt for event in events.of(RecoveryFailed)] == [0, 1]


def test_a_training_whose_checkpoints_vanish_does_not_restart_from_scratch(
    server: Misbehaving, service: ServiceClient
) -> None:
    loop = tinkex.resilient_training(
        service, batch, steps=3, name="vanished", base_model="toy", checkpoint_every=1, policy=QUICK
    )

    def all_is_lost_in_the_third(step: TrainingStep[Any]) -> None:
        if step.index == 2:
            server.checkpoints.clear()
            server.gone.add(step.training.model_id)
        step.training.optim_step(types.AdamParams()).result(timeout=20)

    with pytest.raises(errors.RecoveryError, match="no longer has a checkpoint of the training 'vanished'"):
        drive(loop, all_is_lost_in_the_third)


class Restarted(Misbehaving):
    """A server that knows only the sessions that were opened since it began; its checkpoints are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: set[str] = set()
        self.num_sessions = 0

    def forget_everything(self) -> None:
        self.sessions.clear()
        self.gone |= set(self.metadata)
        self.results.clear()

    def on_create_session(self, value: Any, request: Request) -> Reply:
        self.num_sessions += 1
        self.sessions.add(f"sess-{self.num_sessions}")
        return reply({"session_id": f"sess-{self.num_sessions}"})

    def on_session_heartbeat(self, value: types.SessionHeartbeatRequest, request: Request) -> Reply:
        return reply({}) if value.session_id in self.sessions else reply({"detail": "unknown"}, status=404)

    def on_create_model(self, value: types.CreateModelRequest, request: Request) -> Reply:
        if value.session_id not in self.sessions:
            return reply({"detail": f"there is no session {value.session_id}"}, status=404)
        return super().on_create_model(value, request)

    def on_retrieve_future(self, value: Any, request: Request) -> Reply:
        if value.request_id not in self.results:
            return reply({"detail": f"there is no request {value.request_id}"}, status=404)
        return super().on_retrieve_future(value, request)


@pytest.mark.parametrize("moment", ["before the step", "while a result is waited for"])
@pytest.mark.parametrize("at", [0, 3])
def test_a_session_that_the_server_forgot_is_replaced(moment: str, at: int, events: Events) -> None:
    server = Restarted()
    forgot = []

    def forget(index: int) -> None:
        if index == at and not forgot:
            forgot.append(index)
            server.forget_everything()

    seen = []
    with ServiceClient(transport=server.transport, config=Config(max_retries=0)) as service:
        loop = tinkex.resilient_training(
            service,
            batch,
            steps=5,
            name="on",
            base_model="toy",
            checkpoint_every=2,
            policy=QUICK,
            events=events,
        )
        for step in loop:
            with step:
                if moment == "before the step":
                    forget(step.index)
                passed = step.training.forward_backward(step.batch, "cross_entropy")
                stepped = step.training.optim_step(types.AdamParams())
                if moment == "while a result is waited for":
                    forget(step.index)
                passed.result(timeout=20)
                stepped.result(timeout=20)
                seen.append((step.training.model_id, step.index))
        by_run: dict[str, list[int]] = {}
        for run, index in seen:
            by_run.setdefault(run, []).append(index)
        last = list(by_run.items())[-1]
        assert last[0].startswith("sess-2:"), "the training continues in a session that the server knows"
        assert last[1] == [*range(at // 2 * 2, 5)]
    assert [event.condition for event in events.of(RunUnhealthy)] == ["lost"]
    assert loop.recoveries == 1


def test_it_may_restart_from_the_best_checkpoint(server: Misbehaving, service: ServiceClient) -> None:
    server.loses_at = [4]
    loop = tinkex.resilient_training(
        service,
        batch,
        steps=4,
        name="best",
        base_model="toy",
        checkpoint_every=1,
        policy=RecoveryPolicy(checkpoint=Best("loss", highest=True), restore_optimizer=False),
    )
    assert [index for _, index in walk(loop)] == [0, 1, 2, 1, 2, 3]  # the loss was highest after one batch
    assert [value.optimizer for value in server.values("load_weights")] == [False]


def test_a_404_of_something_else_is_the_users(server: Misbehaving, service: ServiceClient) -> None:
    server.answers["create_sampling_session"] = lambda value, request: reply({"detail": "no such"}, 404)
    loop = tinkex.resilient_training(service, batch, steps=2, name="theirs", base_model="toy")
    with pytest.raises(errors.NotFoundError):
        drive(loop, lambda step: service.create_sampling_client(base_model="unknown"))
    assert loop.recoveries == 0


def test_a_deletion_that_is_rejected_is_an_event(
    server: Misbehaving, service: ServiceClient, events: Events
) -> None:
    server.answers["delete_checkpoint"] = lambda value, request: reply({"detail": "not yours"}, 403)
    loop = tinkex.resilient_training(
        service, batch, steps=3, name="kept", base_model="toy", checkpoint_every=1, keep=1, events=events
    )
    assert len(walk(loop)) == 3
    assert [event.callback for event in events.of(CallbackFailed)] == ["keep", "keep"]


@pytest.mark.slow
def test_the_run_of_a_step_can_have_an_observer_of_its_queue(
    server: Misbehaving, service: ServiceClient
) -> None:
    received: list[tuple[str, str | None]] = []
    paused = iter([reply({"queue_state": "paused_capacity", "queue_state_reason": "full"}, status=408)])
    loop = tinkex.resilient_training(service, batch, steps=1, name="watched", base_model="toy")

    def watched(step: TrainingStep[Any]) -> None:
        step.training.queue_state_observer = lambda *news: received.append(news)
        server.answers["retrieve_future"] = lambda value, request: (
            next(paused, None) or server.on_retrieve_future(value, request)
        )
        step.training.optim_step(types.AdamParams()).result(timeout=20)

    drive(loop, watched)
    assert received == [("paused_capacity", "full")]


def test_a_step_without_its_block_is_rejected(server: Misbehaving, service: ServiceClient) -> None:
    loop = tinkex.resilient_training(service, batch, steps=2, name="bare", base_model="toy")
    with pytest.raises(RuntimeError, match="with step:"):
        for _ in loop:
            pass
    with pytest.raises(RuntimeError, match="iterated once"):
        next(iter(loop))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_model": None}, "base_model=… and start_from=…"),
        ({"start_from": "tinker://a/weights/b"}, "set exactly one of"),
        ({"name": "with space"}, "name must be"),
        ({"checkpoint_every": None}, "needs checkpoints to restart from"),
        ({"checkpoint_every": 0}, "checkpoint_every must be positive"),
        ({"checkpoint_every_s": -1.0}, "checkpoint_every_s must be positive"),
        ({"keep": 0}, "keep must be positive"),
        ({"resume": "maybe"}, "resume must be"),
        ({"steps": None}, "set steps="),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_rejected(options: dict[str, Any], message: str) -> None:
    with ServiceClient(transport=Misbehaving().transport) as service:
        given: dict[str, Any] = {"name": "x", "base_model": "toy", "steps": 2, **options}
        with pytest.raises(ValueError, match=message):
            tinkex.resilient_training(service, batch, **given)
        with pytest.raises(ValueError, match="number of batches"):
            tinkex.resilient_training(service, iter([1]), name="x", base_model="toy", progress=True)


def test_a_number_that_is_none_is_not_reported(server: Misbehaving, service: ServiceClient) -> None:
    loop = tinkex.resilient_training(service, batch, steps=1, name="nan", base_model="toy")
    with pytest.raises(ValueError, match="loss of step 0 is nan"):
        drive(loop, lambda step: step.report(loss=float("nan")))
