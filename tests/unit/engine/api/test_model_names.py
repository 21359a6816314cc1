"""Names of models with a context length, or with a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.engine.api.asgi import Answer, Client
from tests.unit.engine.api.test_downloads import save
from tests.unit.engine.api.test_sampling import request, sampler
from tests.unit.engine.api.test_training import pass_body, send_pass
from tinkex.engine.engine import Engine

TOO_LONG = "asks for a context of 100000 tokens, and that of this model is 512; use 'tiny'"


def create_sampler(client: Client, **weights: Any) -> Answer:
    body = {"session_id": client.session(), "sampling_session_seq_id": 0, **weights}
    return client.post("create_sampling_session", body)


def create_run(client: Client, base_model: str) -> Answer:
    body = {
        "session_id": client.session(),
        "model_seq_id": 0,
        "base_model": base_model,
        "lora_config": {"rank": 2},
    }
    return client.post("create_model", body)


def test_a_context_beyond_the_models_is_rejected(ada: Client) -> None:
    path = save(ada, ada.create(), 1)
    loaded = {"session_id": ada.session(), "model_seq_id": 0, "path": path, "base_model": "tiny:peft:100000"}
    for answer in (
        create_run(ada, "tiny:peft:100000"),
        create_sampler(ada, base_model="tiny:peft:100000"),
        create_sampler(ada, base_model="tiny:peft:100000", model_path=path),
        create_sampler(ada, base_model=f"tiny:peft:100000;{path}"),
        ada.post("load_weights", loaded),
    ):
        assert (answer.status, TOO_LONG in answer.detail) == (400, True), answer.body


def test_a_context_of_no_tokens_is_rejected(ada: Client) -> None:
    for answer in (create_run(ada, "tiny:peft:0"), create_sampler(ada, base_model="tiny:peft:00")):
        assert (answer.status, "use 'tiny', or a context of 1 up to that" in answer.detail) == (400, True)


@pytest.mark.parametrize(
    "suffix",
    [":peft:x", ":peft:-1", ":peft:", ":peft:" + "9" * 30, ":peft:6.4", ":latest", ":x:peft:64", ":"],
)
def test_any_other_suffix_is_rejected(ada: Client, suffix: str) -> None:
    path = save(ada, ada.create(), 1)
    for answer in (
        create_run(ada, f"tiny{suffix}"),
        create_sampler(ada, base_model=f"tiny{suffix}"),
        create_sampler(ada, base_model=f"tiny{suffix};{path}"),
    ):
        assert (answer.status, "use 'tiny', or 'tiny:peft:<n>'" in answer.detail) == (400, True), answer.body


def test_a_name_that_is_served_as_a_whole_may_have_any_context(engine: Engine, ada: Client) -> None:
    engine.models.add({"other:peft:100000": engine.models.find("tiny").source})
    assert create_run(ada, "other:peft:100000").status == 200


def test_samples_end_where_the_context_in_the_name_does(ada: Client) -> None:
    short = sampler(ada, base_model="tiny:peft:8")
    body = request(short, 1)
    body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7, 8, 9]}]}
    body["sampling_params"] = {"max_tokens": 20, "stop": [], "seed": 1}
    sampled = ada.result(ada.post("asample", body), accept="application/json").json
    assert [len(one["tokens"]) for one in sampled["sequences"]] == [3] * len(sampled["sequences"])
    body |= {"seq_id": 2, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5] * 9}]}}
    rejected = ada.post("asample", body)
    assert (rejected.status, "prompt has 9 tokens" in rejected.detail) == (400, True)


def test_datums_beyond_the_context_in_the_name_are_rejected(ada: Client) -> None:
    run = ada.result(create_run(ada, "tiny:peft:4")).json["model_id"]
    rejected = send_pass(ada, pass_body(run, 1, [5, 6, 7, 8, 9, 10]))
    assert (rejected.status, "data[0].model_input has 5 tokens" in rejected.detail) == (400, True)
    assert ada.result(send_pass(ada, pass_body(run, 2, [5, 6, 7, 8, 9]))).status == 200


def test_a_name_may_hold_a_base_model_and_a_checkpoint(ada: Client) -> None:
    path = save(ada, ada.create(), 1)
    for weights in ({"base_model": f"tiny:peft:64;{path}"}, {"model_path": f"tiny:peft:64;{path}"}):
        created = create_sampler(ada, **weights)
        found = ada.get(f"samplers/{created.json['sampling_session_id']}").json
        assert (found["base_model"], found["model_path"]) == ("tiny:peft:64", path)
    direct = request("", 1)
    del direct["sampling_session_id"]
    assert ada.result(ada.post("asample", {**direct, "base_model": f"tiny;{path}"})).status == 200


@pytest.mark.parametrize(
    ("weights", "status", "words"),
    [
        ({"base_model": "another;{path}"}, 404, "does not serve a model named 'another'"),
        ({"base_model": "tiny;{path}", "model_path": "{path}"}, 400, "leave out the other"),
        ({"base_model": "tiny", "model_path": "tiny;{path}"}, 400, "leave out the other"),
        ({"base_model": "tiny;tinker://nobody/weights/x"}, 404, "no checkpoint tinker://nobody/weights/x"),
        ({"base_model": "tiny;elsewhere"}, 404, "does not serve a model named 'tiny;elsewhere'"),
    ],
)
def test_a_name_that_cannot_be_honoured_is_rejected(
    ada: Client, weights: dict[str, str], status: int, words: str
) -> None:
    path = save(ada, ada.create(), 1)
    answer = create_sampler(ada, **{name: value.format(path=path) for name, value in weights.items()})
    assert (answer.status, words in answer.detail) == (status, True), answer.body
