"""Helpers of the value types: what programs read off them, and the shapes that servers send."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from tinkex import types
from tinkex._wire import json
from tinkex.losses.regularizers import L2


class Letters:
    """A tokenizer with a token per letter."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(letter) for letter in text]


class Client:
    def get_tokenizer(self) -> Letters:
        return Letters()


@pytest.mark.parametrize(
    ("tokenizer", "options", "tokens"),
    [
        (Letters(), {}, [0, 72, 105]),
        (Client(), {}, [0, 72, 105]),
        (Letters(), {"add_special_tokens": False}, [72, 105]),
    ],
    ids=["tokenizer", "client", "options"],
)
def test_a_text_is_encoded_by_a_tokenizer_or_that_of_a_client(
    tokenizer: Any, options: dict[str, Any], tokens: list[int]
) -> None:
    prompt = types.ModelInput.from_text("Hi", tokenizer, **options)
    assert prompt.to_ints() == tokens
    assert len(prompt.chunks) == 1


@pytest.mark.parametrize(("text", "tokenizer"), [("Hi", "some/model"), ("Hi", None), (b"Hi", Letters())])
def test_a_text_needs_a_tokenizer(text: Any, tokenizer: Any) -> None:
    with pytest.raises(TypeError, match="from_text"):
        types.ModelInput.from_text(text, tokenizer)


@pytest.mark.parametrize(
    ("metrics", "loss"),
    [({"loss:sum": 2.5, "loss": 1.0}, 2.5), ({"loss": 1.0}, 1.0), ({"tokens:sum": 3.0}, None)],
)
def test_the_loss_of_a_pass_is_its_sum(metrics: dict[str, float], loss: float | None) -> None:
    assert types.ForwardBackwardOutput("CrossEntropyLossReturn", [], metrics).loss == loss


@pytest.mark.parametrize(
    ("path", "run_id"),
    [
        ("tinker://session-1:train:0/weights/a", "session-1:train:0"),
        ("tinker://run/sampler_weights/b", "run"),
        ("somewhere/else", None),
    ],
)
def test_a_checkpoint_names_its_run(path: str, run_id: str | None) -> None:
    checkpoint = types.Checkpoint(
        checkpoint_id="weights/a", checkpoint_type="training", time=datetime.now(UTC), tinker_path=path
    )
    assert checkpoint.training_run_id == run_id


@pytest.mark.parametrize(
    ("sent", "names"),
    [
        (b'{"supported_models": ["a", "b"]}', ["a", "b"]),
        (b'{"supported_models": [{"model_name": "a", "model_id": "id-1", "arch": "llama"}]}', ["a"]),
        (b'{"supported_models": ["a", null, {"model_name": "b", "news": 1}]}', ["a", "b"]),
        (b'{"supported_models": [{"model_id": "id-1"}]}', []),
        (b'{"supported_models": []}', []),
    ],
)
def test_models_are_sent_as_names_or_objects(sent: bytes, names: list[str]) -> None:
    response = json.decode(sent, types.GetServerCapabilitiesResponse)
    assert response.model_names() == names
    assert all(isinstance(model, types.SupportedModel) for model in response.supported_models)
    assert types.GetServerCapabilitiesResponse.model_validate(response.model_dump()) == response


def test_a_model_has_its_id_and_architecture() -> None:
    model = types.SupportedModel.model_validate({"model_name": "a", "model_id": "id-1", "arch": "llama"})
    assert (model.model_id, model.arch) == ("id-1", "llama")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"status": "pending"}, types.FuturePendingResponse()),
        ({"status": "completed", "result": {"a": 1}}, types.FutureCompletedResponse(result={"a": 1})),
        ({"path": "tinker://r/weights/a"}, types.FutureCompletedResponse(result={"path": "tinker://r/weights/a"})),
        (
            {"status": "complete_metadata", "response_payload_size": 9},
            types.FutureCompleteMetadataResponse(response_payload_size=9),
        ),
        (
            {"status": "failed", "error": {"message": "no", "category": "user"}},
            types.FutureFailedResponse(error={"message": "no", "category": "user"}),
        ),
        ({"error": "no", "category": "user"}, types.RequestFailedResponse(error="no", category=types.RequestErrorCategory.User)),
        (
            {"type": "try_again", "request_id": "r", "queue_state": "paused_capacity", "retry_after_ms": 250},
            types.TryAgainResponse(request_id="r", queue_state="paused_capacity", retry_after_ms=250),
        ),
        ({"status": "try_again", "queue_state": "active"}, types.TryAgainResponse(queue_state="active")),
        ({"status": "failed", "error": "no"}, types.RequestFailedResponse(error="no")),
        ({"status": "failed", "error": None}, types.FutureFailedResponse(error={})),
        ({"status": "failed"}, types.FutureFailedResponse(error={})),
    ],
    ids=[
        "pending", "completed", "plain", "metadata", "failed", "error", "try-again",
        "try-again-status", "failed-text", "failed-null", "failed-alone",
    ],
)  # fmt: skip
def test_the_state_of_an_operation_follows_from_the_reply(body: dict[str, Any], expected: object) -> None:
    assert types.parse_future_response(body) == expected


def test_a_failed_operation_says_what_and_whose_fault() -> None:
    failed = types.FutureFailedResponse(error={"message": "no such token", "category": "user"})
    assert (failed.message, failed.category) == ("no such token", types.RequestErrorCategory.User)


@pytest.mark.parametrize(
    "body",
    [
        {"status": "exploded"},
        {"type": "try_again", "retry_after_ms": -1},
        {"status": "completed"},
        {"status": "completed", "result": None},
        {"status": "completed", "result": [1]},
    ],
)
def test_unknown_states_are_rejected(body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"status|retry_after_ms|result"):
        types.parse_future_response(body)


def one(data: Any) -> Any: ...
def two(data: Any, logprobs: Any) -> Any: ...
def three(data: Any, logprobs: Any, options: Any) -> Any: ...
def with_default(data: Any, logprobs: Any, scale: float = 1.0) -> Any: ...
def by_keyword(data: Any, logprobs: Any, *, scale: float) -> Any: ...


@pytest.mark.parametrize("fn", [two, with_default, L2(), partial(three, options={}), lambda *terms: None])
def test_a_regularizer_takes_the_data_and_the_logprobs(fn: Callable[..., Any]) -> None:
    assert types.RegularizerSpec(fn, weight=1.0, name="term").weight == 1.0


@pytest.mark.parametrize("fn", [one, three, by_keyword, lambda: None])
def test_a_regularizer_with_other_arguments_is_rejected_where_it_is_built(fn: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"two arguments, \(data, logprobs\)"):
        types.RegularizerSpec(fn, weight=1.0, name="term")


def test_a_learning_rate_of_zero_is_allowed_and_a_negative_one_is_not() -> None:
    assert types.AdamParams(learning_rate=0).learning_rate == 0.0
    with pytest.raises(ValueError, match="learning_rate"):
        types.AdamParams(learning_rate=-1e-9)


def test_a_raw_response_is_text_and_json() -> None:
    response = types.RawResponse(status=200, body=b'{"a": [1]}')
    assert (response.text, response.json()) == ('{"a": [1]}', {"a": [1]})
    with pytest.raises(ValueError, match="JSON"):
        types.RawResponse(status=200, body=b"not JSON").json()
