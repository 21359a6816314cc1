"""The training-platform protocol: one loop, two backends that share nothing, the same behaviour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinkex
from tests.scripted import ScriptedServer
from tinkex import types
from tinkex._wire import proto
from tinkex.platform import Deferred, Done, PassResult, PlatformSession, TinkexPlatform, TrainingPlatform
from tinkex.testing import LocalEngine, Reply, Request, local_engine, reply

pytestmark = pytest.mark.slow


class Bigrams:
    """Somebody else's backend: a table of logits for the next token after each, in numpy, trained by plain Adam."""

    SIZE = 64

    def __init__(self) -> None:
        self.logits: dict[str, np.ndarray] = {}
        self.gradient: dict[str, np.ndarray] = {}
        self.moments: dict[str, tuple[np.ndarray, np.ndarray, int]] = {}
        self.saved: dict[str, np.ndarray] = {}

    def create_session(
        self, model: str, options: Mapping[str, Any] | None = None
    ) -> Deferred[PlatformSession]:
        if set(options or {}) - {"checkpoint"}:
            raise ValueError(f"bigrams know no option {min(options or {})!r}")
        session_id = f"bigrams-{len(self.logits)}"
        start = self.saved[options["checkpoint"]] if options else np.zeros((self.SIZE, self.SIZE))
        self.logits[session_id] = start.copy()
        self.gradient[session_id] = np.zeros_like(start)
        self.moments[session_id] = (np.zeros_like(start), np.zeros_like(start), 0)
        return Done(PlatformSession(session_id, model))

    def forward_backward(
        self,
        session: PlatformSession,
        data: Sequence[types.Datum],
        loss_fn: types.LossFnType = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Deferred[PassResult]:
        if loss_fn != "cross_entropy" or loss_fn_config:
            raise ValueError(f"bigrams know no loss {loss_fn!r} with settings {loss_fn_config}")
        table, loss, logprobs = self.logits[session.session_id], 0.0, []
        for datum in data:
            before = datum.model_input.to_numpy()
            target = datum.loss_fn_inputs["target_tokens"].to_numpy()
            weights = datum.loss_fn_inputs.get("weights")
            weight = np.ones(len(target)) if weights is None else weights.to_numpy()
            shifted = table[before] - table[before].max(-1, keepdims=True)
            log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
            chosen = log_p[np.arange(len(target)), target]
            slope = np.exp(log_p)
            slope[np.arange(len(target)), target] -= 1
            np.add.at(self.gradient[session.session_id], before, weight[:, None] * slope)
            loss -= float((weight * chosen).sum())
            logprobs.append(chosen)
        return Done(PassResult(loss, {"loss:sum": loss}, logprobs))

    def optim_step(
        self, session: PlatformSession, optim_params: types.AdamParams
    ) -> Deferred[Mapping[str, float]]:
        key, p = session.session_id, optim_params
        gradient = self.gradient[key]
        first, second, step = self.moments[key]
        first = p.beta1 * first + (1 - p.beta1) * gradient
        second = p.beta2 * second + (1 - p.beta2) * gradient**2
        step += 1
        update = (first / (1 - p.beta1**step)) / (np.sqrt(second / (1 - p.beta2**step)) + p.eps)
        self.logits[key] -= p.learning_rate * update
        self.moments[key] = (first, second, step)
        norm = float(np.linalg.norm(gradient))
        self.gradient[key] = np.zeros_like(gradient)
        return Done({"grad_norm": norm})

    def save_checkpoint(self, session: PlatformSession, name: str) -> Deferred[str]:
        where = f"memory:{session.session_id}/{name}"
        self.saved[where] = self.logits[session.session_id].copy()
        return Done(where)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[LocalEngine]:
    with local_engine(tiny_model) as running:
        yield running


@pytest.fixture(params=["tinkex", "bigrams"])
def backend(request: pytest.FixtureRequest) -> Iterator[tuple[TrainingPlatform, str]]:
    if request.param == "bigrams":
        yield Bigrams(), "bigrams"
        return
    engine: LocalEngine = request.getfixturevalue("engine")
    with engine.service() as service:
        yield TinkexPlatform(service), engine.base_model


def batch() -> list[types.Datum]:
    return [
        types.Datum(types.ModelInput.from_ints([5, 6, 7, 8]), {"target_tokens": [6, 7, 8, 9]}),
        types.Datum(
            types.ModelInput.from_ints([9, 8]), {"target_tokens": [8, 7], "weights": np.float32([1, 0])}
        ),
    ]


def train(platform: TrainingPlatform, session: PlatformSession, steps: int) -> list[float]:
    """A framework's loop, which knows the protocol and nothing else."""
    passes = []
    for _ in range(steps):
        passes.append(platform.forward_backward(session, batch()))
        platform.optim_step(session, types.AdamParams(learning_rate=3e-3))
    return [one.result(timeout=60).loss for one in passes]


@pytest.mark.slow
def test_any_backend_trains_by_the_same_loop(backend: tuple[TrainingPlatform, str]) -> None:
    platform, model = backend
    assert isinstance(platform, TrainingPlatform)
    session = platform.create_session(model).result(timeout=60)
    losses = train(platform, session, 12)
    assert losses[-1] < losses[0]
    first = platform.forward_backward(session, batch()).result(timeout=60)
    assert [len(one) for one in first.logprobs] == [4, 2]
    expected = -float(np.sum(first.logprobs[0])) - float(first.logprobs[1][0])
    assert first.loss == pytest.approx(expected, rel=1e-4)
    metrics = platform.optim_step(session, types.AdamParams(learning_rate=0.0)).result(timeout=60)
    assert any("grad" in name and value > 0 for name, value in metrics.items())


def test_a_checkpoint_is_where_the_next_session_starts(backend: tuple[TrainingPlatform, str]) -> None:
    platform, model = backend
    session = platform.create_session(model).result(timeout=60)
    train(platform, session, 3)
    saved = platform.save_checkpoint(session, "third").result(timeout=60)
    again = platform.create_session(model, {"checkpoint": saved}).result(timeout=60)
    assert again.session_id != session.session_id
    here, there = (platform.forward_backward(one, batch()).result(timeout=60) for one in (session, again))
    assert here.loss == there.loss


@pytest.mark.slow
async def test_results_can_be_awaited(backend: tuple[TrainingPlatform, str]) -> None:
    platform, model = backend
    session = await platform.create_session(model)
    passed = await platform.forward_backward(session, batch())
    await platform.optim_step(session, types.AdamParams())
    assert passed.loss > 0


def test_what_a_backend_does_not_support_is_rejected(backend: tuple[TrainingPlatform, str]) -> None:
    platform, model = backend
    with pytest.raises((TypeError, ValueError), match="sorcery"):
        platform.create_session(model, {"sorcery": 3}).result(timeout=60)


def test_a_session_of_another_platform_is_rejected(engine: LocalEngine) -> None:
    with engine.service() as service:
        platform = TinkexPlatform(service)
        with pytest.raises(ValueError, match="did not create the session 'x'"):
            platform.forward_backward(PlatformSession("x", "y"), batch())
        with pytest.raises(ValueError, match="'rank'"):
            platform.create_session("m", {"checkpoint": "tinker://a/weights/b", "rank": 3})


def test_the_training_client_is_at_hand(engine: LocalEngine) -> None:
    with engine.service() as service:
        platform = TinkexPlatform(service)
        session = platform.create_session(engine.base_model, {"rank": 2}).result(timeout=60)
        assert isinstance(platform.training(session), tinkex.TrainingClient)
        assert platform.training(session).get_info().lora_rank == 2


def test_a_server_that_tells_no_loss_is_a_typed_error() -> None:
    def lossless(value: types.ForwardBackwardRequest, request: Request) -> Reply:
        output = types.ForwardBackwardOutput("ArrayRecord", [], {"tokens:sum": 3.0})
        return server.accept(reply(proto.encode_forward_backward_output(output)))

    server = ScriptedServer(forward_backward=lossless)
    with tinkex.ServiceClient(transport=server.transport) as service:
        platform = TinkexPlatform(service)
        session = platform.create_session("toy").result(timeout=60)
        with pytest.raises(tinkex.APIResponseValidationError, match=r"no loss:sum, only \['tokens:sum'\]"):
            platform.forward_backward(session, batch()).result(timeout=60)
