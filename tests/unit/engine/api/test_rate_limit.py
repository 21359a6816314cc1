"""The token rate limit per user: 429 with Retry-After; unused tokens are refunded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import started_engine
from tests.unit.engine.api.asgi import Answer, Client
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.errors import SetupError

RATE = 1


@pytest.fixture
def slow(tiny_model: Path, tmp_path: Path) -> Iterator[Engine]:
    """An engine with a rate limit of one token per second and a burst of ten."""
    config = EngineConfig(
        home=tmp_path,
        models={"tiny": str(tiny_model)},
        long_poll_s=0.25,
        max_tokens_per_s_per_user=RATE,
    )
    with started_engine(config) as engine:
        engine.store.users.add_key("bob", "tml-bob", 0.0)
        yield engine


def sample(client: Client, max_tokens: int, stop: list[int] | None = None) -> Answer:
    params = {"max_tokens": max_tokens, "temperature": 0, "stop": stop or []}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    return client.post("asample", {"base_model": "tiny", "prompt": prompt, "sampling_params": params})


@pytest.mark.slow
def test_a_user_over_the_rate_limit_gets_retry_after_and_others_are_not_affected(slow: Engine) -> None:
    ada, bob = (Client(build_app(slow), key) for key in (slow.api_key, "tml-bob"))
    assert ada.result(sample(ada, 200)).status == 200
    rejected = sample(ada, 1)
    assert rejected.status == 429
    assert rejected.json["queue_state"] == "paused_rate_limit"
    assert "1 tokens computed in a second" in rejected.detail
    assert (
        60 < int(rejected.headers["retry-after"]) <= 193
    )  # 203 tokens at one per second, with a burst of ten
    assert bob.result(sample(bob, 4)).status == 200
    run = bob.create()
    data = [
        {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5] * 300}]},
            "loss_fn_inputs": {"target_tokens": {"data": [6] * 300, "dtype": "int64", "shape": [300]}},
        }
    ]
    body = {"forward_backward_input": {"data": data, "loss_fn": "cross_entropy"}, "model_id": run}
    first = bob.post("forward_backward", {**body, "seq_id": 1})
    assert bob.result(first).status == 200
    second = bob.post("forward_backward", {**body, "seq_id": 2})
    assert (second.status, second.json["queue_state"]) == (429, "paused_rate_limit")


def test_tokens_that_a_sample_did_not_use_are_refunded(slow: Engine) -> None:
    ada = Client(build_app(slow), slow.api_key)
    (first,) = ada.result(sample(ada, 1)).json["sequences"][0]["tokens"]
    ended = ada.result(sample(ada, 200, stop=[first])).json["sequences"][0]
    assert (ended["stop_reason"], len(ended["tokens"])) == ("stop", 1)
    assert sample(ada, 200).status == 200


def test_a_cancelled_sample_is_refunded(slow: Engine) -> None:
    ada = Client(build_app(slow), slow.api_key)
    with slow.paused():
        waiting = sample(ada, 200)
        assert sample(ada, 1).status == 429
        assert ada.post("cancel_future", {"request_id": waiting.json["request_id"]}).status == 200
    assert "cancelled" in ada.result(waiting).json["error"]
    assert sample(ada, 1).status == 200


def test_a_rate_limit_of_zero_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="max_tokens_per_s_per_user is 0"):
        EngineConfig(home=tmp_path, max_tokens_per_s_per_user=0)
