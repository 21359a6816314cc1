"""A user's tokens a second: over it comes 429 with the time to wait; what was not used is given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.engine.api.asgi import Answer, Client
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.errors import SetupError

RATE = 1


@pytest.fixture
def slow(tiny_model: Path, tmp_path: Path) -> Iterator[Engine]:
    """An engine that lets a user have a token a second, ten of them in advance."""
    engine = Engine(
        EngineConfig(
            home=tmp_path,
            models={"tiny": str(tiny_model)},
            long_poll_s=0.25,
            max_tokens_per_s_per_user=RATE,
        )
    )
    engine.store.users.add_key("bob", "tml-bob", 0.0)
    engine.start()
    engine.load_models().result()
    yield engine
    engine.close()


def sample(client: Client, max_tokens: int, stop: list[int] | None = None) -> Answer:
    params = {"max_tokens": max_tokens, "temperature": 0, "stop": stop or []}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    return client.post("asample", {"base_model": "tiny", "prompt": prompt, "sampling_params": params})


def test_a_user_who_is_too_fast_is_told_when_to_go_on_and_others_go_on_now(slow: Engine) -> None:
    ada, bob = (Client(build_app(slow), key) for key in (slow.api_key, "tml-bob"))
    assert ada.result(sample(ada, 200)).status == 200
    refused = sample(ada, 1)
    assert refused.status == 429
    assert refused.json["queue_state"] == "paused_rate_limit"
    assert "1 tokens computed in a second" in refused.detail
    assert (
        60 < int(refused.headers["retry-after"]) <= 193
    )  # 203 tokens at one a second, ten of them in advance
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


def test_what_a_sample_did_not_draw_is_given_back(slow: Engine) -> None:
    ada = Client(build_app(slow), slow.api_key)
    (first,) = ada.result(sample(ada, 1)).json["sequences"][0]["tokens"]
    ended = ada.result(sample(ada, 200, stop=[first])).json["sequences"][0]
    assert (ended["stop_reason"], len(ended["tokens"])) == ("stop", 1)
    assert sample(ada, 200).status == 200


def test_a_sample_that_was_given_up_costs_nothing(slow: Engine) -> None:
    ada = Client(build_app(slow), slow.api_key)
    with slow.paused():
        waiting = sample(ada, 200)
        assert sample(ada, 1).status == 429
        assert ada.post("cancel_future", {"request_id": waiting.json["request_id"]}).status == 200
    assert "cancelled" in ada.result(waiting).json["error"]
    assert sample(ada, 1).status == 200


def test_a_rate_that_lets_nothing_through_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="max_tokens_per_s_per_user is 0"):
        EngineConfig(home=tmp_path, max_tokens_per_s_per_user=0)
