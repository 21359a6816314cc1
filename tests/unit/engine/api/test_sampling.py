from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.unit.engine.api.asgi import PROTO, Client
from tinkex._wire import proto as wire_proto
from tinkex.engine.engine import Engine
from tinkex.engine.store import Outcome, ResultFormat

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5]}, {"type": "encoded_text", "tokens": [6, 7]}]}


def sampler(client: Client, session: str | None = None, number: int = 0, **weights: str) -> str:
    request = {
        "session_id": session or client.session(),
        "sampling_session_seq_id": number,
        **(weights or {"base_model": "tiny"}),
        "type": "create_sampling_session",
    }
    answer = client.post("create_sampling_session", request)
    assert answer.status == 200, answer.body
    sampler_id: str = answer.json["sampling_session_id"]
    return sampler_id


def request(sampler_id: str, seq_id: int = 0, num_samples: int = 1, **params: Any) -> dict[str, Any]:
    return {
        "num_samples": num_samples,
        "prompt": PROMPT,
        "sampling_params": {
            "max_tokens": 3,
            "temperature": 1.0,
            "top_k": -1,
            "top_p": 1.0,
            "stop": [],
            **params,
        },
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
        "type": "sample",
    }


def test_a_submission_returns_its_sequence_ids_and_its_result_is_protobuf(ada: Client) -> None:
    submitted = ada.post("asample", request(sampler(ada), num_samples=2))
    ids = submitted.json["sample_sequence_ids"]
    assert len(set(ids)) == 2
    answer = ada.result(submitted, accept=PROTO)
    assert answer.headers["content-type"] == PROTO
    response = wire_proto.decode_sample_response(answer.body, ids)
    assert [len(s.tokens) for s in response.sequences] == [3, 3]
    assert response.prompt_logprobs is not None
    assert response.prompt_logprobs[0] is None
    assert None not in response.prompt_logprobs[1:]


def test_older_clients_get_samples_as_json(ada: Client) -> None:
    answer = ada.result(ada.post("asample", request(sampler(ada))), accept="application/json").json
    (sequence,) = answer["sequences"]
    assert len(sequence["tokens"]) == len(sequence["logprobs"]) == 3
    assert sequence["stop_reason"] == "length"
    assert answer["prompt_logprobs"][0] is None


def test_get_sampler_returns_the_weights(ada: Client, bob: Client) -> None:
    session = ada.session()
    run = ada.create(session)
    save = {"model_id": run, "path": "final", "seq_id": 1, "type": "save_weights_for_sampler"}
    path = ada.result(ada.post("save_weights_for_sampler", save)).json["path"]
    assert path == f"tinker://{run}/sampler_weights/final"
    sampler_id = sampler(ada, session, 3, model_path=path)
    assert sampler_id == f"{session}:sample:3"
    assert sampler(ada, session, 3, model_path=path) == sampler_id
    assert ada.get(f"samplers/{sampler_id}").json == {
        "sampler_id": sampler_id,
        "base_model": "tiny",
        "model_path": path,
    }
    assert bob.get(f"samplers/{sampler_id}").status == 404
    assert bob.post("asample", request(sampler_id)).status == 404
    assert sampler_id in ada.get(f"sessions/{session}").json["sampler_ids"]
    unnamed = {"model_id": run, "sampling_session_seq_id": 4, "seq_id": 2, "type": "save_weights_for_sampler"}
    assert ada.result(ada.post("save_weights_for_sampler", unnamed)).json["sampling_session_id"] == (
        f"{session}:sample:4"
    )


def test_a_seq_id_identifies_one_sampler(ada: Client) -> None:
    session = ada.session()
    sampler(ada, session, 0, base_model="tiny")
    other = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny:peft:1"}
    assert ada.post("create_sampling_session", other).status == 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": {"chunks": []}}, "empty"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [10**6]}]}}, "1000000"),
        ({"prompt": {"chunks": [{"type": "image", "data": "aGk=", "format": "png"}]}}, "image"),
        ({"num_samples": 0}, "num_samples"),
        ({"record_stability_info": True}, "record_stability_info"),
        ({"sampling_params": {"max_tokens": 1, "min_p": 2}}, "min_p"),
        ({"sampling_params": {"max_tokens": 1, "typical_p": 0.1}}, "typical_p"),
        ({"sampling_params": {"max_tokens": 1, "top_p": 2.0}}, "top_p"),
        ({"beam_width": 4}, "beam_width"),
    ],
)
def test_invalid_samples_are_rejected(ada: Client, change: dict[str, Any], message: str) -> None:
    answer = ada.post("asample", {**request(sampler(ada)), **change})
    assert answer.status == 400
    assert message in answer.detail


@pytest.mark.slow
def test_an_overflowing_max_tokens_ends_with_the_context_and_does_not_stop_other_samples(ada: Client) -> None:
    sampler_id = sampler(ada)
    answer = ada.result(ada.post("asample", request(sampler_id, max_tokens=10**21, temperature=0.0))).json
    assert len(answer["sequences"][0]["tokens"]) <= 512
    after = ada.result(ada.post("asample", request(sampler_id, 1, seed=10**26, top_k=10**26))).json
    assert len(after["sequences"][0]["tokens"]) == 3


def test_waiting_polls_return_when_the_result_is_available(ada: Client, engine: Engine) -> None:
    sampler_id = sampler(ada)
    ada.result(ada.post("asample", request(sampler_id, 0)))

    async def submit_and_poll() -> list[int]:
        submitted = [await ada.acall("POST", "/api/v1/asample", request(sampler_id, n)) for n in range(1, 9)]
        bodies = [{"request_id": answer.json["request_id"]} for answer in submitted]

        async def poll(body: dict[str, Any]) -> int:
            while True:
                answer = await ada.acall("POST", "/api/v1/retrieve_future", body)
                if answer.status != 408:
                    return answer.status

        return list(await asyncio.gather(*map(poll, bodies)))

    assert asyncio.run(submit_and_poll()) == [200] * 8


def test_a_result_can_be_fetched_again(ada: Client) -> None:
    submitted = ada.post("asample", request(sampler(ada)))
    first, again = (ada.result(submitted, accept=PROTO) for _ in range(2))
    assert (first.status, first.body) == (again.status, again.body)


def test_unknown_results_and_those_of_others_are_404_and_expired_ones_410(
    ada: Client, bob: Client, engine: Engine
) -> None:
    submitted = ada.post("asample", request(sampler(ada)))
    ada.result(submitted)
    body = {"request_id": submitted.json["request_id"]}
    assert bob.post("retrieve_future", body).status == 404
    assert ada.post("retrieve_future", {"request_id": "req-none"}).status == 404
    far = time.time() + 1000
    engine.store.futures.prune(fetched_before=far, finished_before=far, expired_before=0.0)
    expired = ada.post("retrieve_future", body)
    assert expired.status == 410
    assert "submit it again" in expired.detail


def test_a_failed_operation_is_returned_as_a_200_with_its_category(ada: Client, engine: Engine) -> None:
    small, large = ada.create(rank=2), ada.create(rank=8)
    save = {"model_id": small, "path": "small", "seq_id": 1, "type": "save_weights"}
    path = ada.result(ada.post("save_weights", save)).json["path"]
    load = {"model_id": large, "seq_id": 1, "path": path, "optimizer": False, "type": "load_weights"}
    answer = ada.result(ada.post("load_weights", load))
    assert answer.status == 200
    assert answer.json["category"] == "user"
    assert "rank" in answer.json["error"]


@pytest.mark.slow
def test_an_abandoned_sample_can_be_cancelled(ada: Client) -> None:
    sampler_id = sampler(ada)
    submitted = [ada.post("asample", request(sampler_id, n, max_tokens=500)) for n in range(70)]
    for answer in submitted:
        assert ada.post("cancel_future", {"request_id": answer.json["request_id"]}).status == 200
    last = ada.result(submitted[-1])
    assert last.json["category"] == "user"
    assert "cancelled" in last.json["error"]


def test_tokenizer_files_are_served_and_nothing_else(ada: Client) -> None:
    assert ada.get("tokenizers/tokenizer.json?model=tiny").json["model"]
    assert ada.get("tokenizers/tokenizer.json").status == 200
    for name in ("model.safetensors", "..", "%2e%2e%2fconfig.json"):
        assert ada.get(f"tokenizers/{name}").status == 404
    assert ada.get("tokenizers/tokenizer.json?model=other").status == 404
    assert ada.get("tokenizers/merges.txt").status == 404


def test_metrics_that_are_not_finite_are_sent_as_text(ada: Client, engine: Engine) -> None:
    from tinkex.engine.encoding import succeeded
    from tinkex.types import OptimStepResponse

    outcome = succeeded(OptimStepResponse(metrics={"grad_norm": float("nan")}))
    assert outcome == Outcome.done(b'{"metrics":{"grad_norm":"NaN"}}', ResultFormat.JSON)


def test_seq_ids_without_a_sampling_session_do_not_conflict(ada: Client) -> None:
    direct = {
        name: value for name, value in request("", seq_id=0).items() if name != "sampling_session_id"
    } | {"base_model": "tiny"}
    for tokens in ([5, 6], [7, 8, 9]):
        other = {**direct, "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]}}
        assert "sequences" in ada.result(ada.post("asample", other), accept="application/json").json
