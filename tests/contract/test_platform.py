"""A framework that uses only four calls trains on the embedded engine and on a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

import tinkex
from tests.contract.backends import BASE_MODEL, WITH_A_MODEL, Backend
from tinkex import types
from tinkex.platform import PlatformSession, TinkexPlatform, TrainingPlatform

pytestmark = pytest.mark.backends(*WITH_A_MODEL)

ADAM = types.AdamParams(learning_rate=1e-2)
OPTIONS = {"rank": 4, "seed": 1}


def batch(shift: int = 0) -> list[types.Datum]:
    tokens = [5 + shift, 9, 12, 7]
    return [
        types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]}),
        types.Datum(types.ModelInput.from_ints([9, 8]), {"target_tokens": [8, 7], "weights": [1.0, 0.0]}),
    ]


@pytest.fixture
def opened(backend: Backend) -> Iterator[tinkex.ServiceClient]:
    with backend.service() as service:
        yield service


def train(platform: TrainingPlatform, session: PlatformSession, steps: int) -> list[float]:
    """The framework's loop: it submits everything before it waits."""
    passes = []
    for shift in range(steps):
        passes.append(platform.forward_backward(session, batch(shift)))
        platform.optim_step(session, ADAM)
    return [one.result(timeout=60).loss for one in passes]


@pytest.mark.slow
def test_its_numbers_are_those_of_the_client_behind_it(opened: tinkex.ServiceClient) -> None:
    platform = TinkexPlatform(opened)
    assert isinstance(platform, TrainingPlatform)
    losses = train(platform, platform.create_session(BASE_MODEL, OPTIONS).result(timeout=60), 4)
    plain = opened.create_lora_training_client(BASE_MODEL, **OPTIONS)
    for shift, loss in enumerate(losses):
        passed = plain.forward_backward(batch(shift), "cross_entropy").result(timeout=60)
        plain.optim_step(ADAM).result(timeout=60)
        assert passed.metrics["loss:sum"] == loss


@pytest.mark.slow
def test_a_checkpoint_brings_the_optimizer_along(opened: tinkex.ServiceClient) -> None:
    platform = TinkexPlatform(opened)
    first = platform.create_session(BASE_MODEL, OPTIONS).result(timeout=60)
    train(platform, first, 3)
    saved = platform.save_checkpoint(first, "third").result(timeout=60)
    assert saved == f"tinker://{first.session_id}/weights/third"
    second = platform.create_session(BASE_MODEL, {"checkpoint": saved}).result(timeout=60)
    assert train(platform, second, 3) == train(platform, first, 3)


async def test_everything_can_be_awaited_and_sessions_do_not_mix(opened: tinkex.ServiceClient) -> None:
    platform = TinkexPlatform(opened)
    one, other = await asyncio.gather(
        platform.create_session(BASE_MODEL, OPTIONS), platform.create_session(BASE_MODEL, OPTIONS)
    )
    before = await platform.forward_backward(other, batch())
    for _ in range(3):
        platform.forward_backward(one, batch())
        await platform.optim_step(one, ADAM)
    after = await platform.forward_backward(other, batch())
    assert after.loss == before.loss
    assert (await platform.forward_backward(one, batch())).loss < before.loss
    assert [len(logprobs) for logprobs in before.logprobs] == [3, 2]
    total = -float(np.sum(before.logprobs[0])) - float(before.logprobs[1][0])
    assert before.loss == pytest.approx(total, rel=1e-4)


def test_what_goes_wrong_is_typed_and_ends_no_other_session(opened: tinkex.ServiceClient) -> None:
    platform = TinkexPlatform(opened)
    session = platform.create_session(BASE_MODEL, OPTIONS).result(timeout=60)
    with pytest.raises(tinkex.APIStatusError, match="no-such-model"):
        platform.create_session("no-such-model").result(timeout=60)
    with pytest.raises(tinkex.APIStatusError):
        platform.create_session(BASE_MODEL, {"checkpoint": "tinker://gone/weights/gone"}).result(timeout=60)
    far = types.Datum(types.ModelInput.from_ints([10_000_000]), {"target_tokens": [1]})
    with pytest.raises(tinkex.TinkexError):
        platform.forward_backward(session, [far]).result(timeout=60)
    with pytest.raises(ValueError, match="unknown loss 'no_such_loss'"):
        platform.forward_backward(session, batch(), "no_such_loss").result(timeout=60)  # type: ignore[arg-type]
    assert train(platform, session, 2), "the session continues"
    platform.training(session).unload().result(timeout=60)
    with pytest.raises(tinkex.APIStatusError):
        platform.optim_step(session, ADAM).result(timeout=60)
    assert train(platform, platform.create_session(BASE_MODEL, OPTIONS).result(timeout=60), 1)
