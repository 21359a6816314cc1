from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
import zstandard

from tests.unit.engine.api.asgi import PROTO, Answer, Client
from tinkex._wire import proto as wire_proto
from tinkex._wire import tinkex_wire_pb2 as pb
from tinkex.engine.encoding import body_size, expand
from tinkex.engine.engine import Engine
from tinkex.types import Datum, ForwardBackwardRequest, ModelInput

TOKENS = [5, 6, 7, 8, 9]


def pass_body(run: str, seq_id: int, tokens: list[int] = TOKENS, *, forward_only: bool = False) -> bytes:
    data = [Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]
    return wire_proto.encode_forward_backward(
        ForwardBackwardRequest(run, seq_id, data, "cross_entropy", forward_only=forward_only)
    )


def send_pass(client: Client, body: bytes, **headers: str) -> Answer:
    return client.post("forward_backward", body, content_type=PROTO, **headers)


def loss(client: Client, submitted: Answer) -> float:
    answer = client.result(submitted, accept=PROTO)
    assert answer.headers["content-type"] == PROTO, answer.body
    return wire_proto.decode_forward_backward_output(answer.body).metrics["loss:sum"]


def optim_step(run: str, seq_id: int) -> dict[str, Any]:
    adam = {
        "learning_rate": 0.01,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }
    return {"model_id": run, "seq_id": seq_id, "adam_params": adam, "type": "optim_step"}


def test_a_training_step_over_protobuf(ada: Client) -> None:
    run = ada.create()
    first = loss(ada, send_pass(ada, pass_body(run, 1)))
    metrics = ada.result(ada.post("optim_step", optim_step(run, 2))).json["metrics"]
    assert metrics
    packed = zstandard.compress(pass_body(run, 3))
    assert loss(ada, send_pass(ada, packed, content_encoding="zstd")) < first


@pytest.mark.slow
def test_chunks_may_arrive_last_first(ada: Client) -> None:
    run = ada.create()
    waiting = [send_pass(ada, pass_body(run, seq_id)) for seq_id in (2, 3)]
    poll = ada.post("retrieve_future", {"request_id": waiting[0].json["request_id"]})
    assert poll.status == 408
    assert poll.json["type"] == "try_again"
    assert poll.json["queue_state"] == "active"
    assert "operation 1" in poll.json["queue_state_reason"]
    assert int(poll.headers["content-length"]) == len(poll.body)
    first = send_pass(ada, pass_body(run, 1))
    assert len({loss(ada, submitted) for submitted in (first, *waiting)}) == 1


def test_bad_input_is_a_400_and_the_run_continues(ada: Client) -> None:
    run = ada.create()
    rejected = send_pass(ada, pass_body(run, 1, [5, 6, 100_000, 7]))
    assert rejected.status == 400
    assert "100000" in rejected.detail
    assert loss(ada, send_pass(ada, pass_body(run, 2))) > 0


def test_an_invalid_body_uses_up_its_seq_id(ada: Client) -> None:
    run = ada.create()
    message = pb.ForwardBackwardRequest(model_id=run, seq_id=1, loss_fn="cross_entropy")
    message.data.add().loss_fn_inputs["target_tokens"].dense = b"123"
    assert send_pass(ada, message.SerializeToString()).status == 400
    wrong = optim_step(run, 2)
    wrong["adam_params"]["learning_rate"] = "fast"
    assert ada.post("optim_step", wrong).status == 400
    wrong["adam_params"] = {"learning_rate": 0.1, "momentum": 0.9}
    wrong["seq_id"] = 3
    rejected = ada.post("optim_step", wrong)
    assert rejected.status == 400
    assert "momentum" in rejected.detail
    assert send_pass(ada, b"\xff\xff").status == 400
    assert loss(ada, send_pass(ada, pass_body(run, 4))) > 0


@pytest.mark.parametrize(
    "rest",
    [
        b'"path": "\\ud800"}',
        b'"adam_params": {"learning_rate": NaN}}',
        b'"adam_params": {"learning_rate": 1e999}}',
        b'"path": "cut of',
        b'"path": "\xff"}',
        b'"adam_params": ' + b"[" * 100_000,
    ],
    ids=["lone surrogate", "NaN", "too large", "cut off", "no text", "deep"],
)
@pytest.mark.parametrize("name", ["optim_step", "save_weights"])
def test_invalid_json_uses_up_its_seq_id_if_it_can_be_read(name: str, rest: bytes, ada: Client) -> None:
    run = ada.create()
    rejected = ada.post(name, b'{"model_id": "%s", "seq_id": 1, %s' % (run.encode(), rest))
    assert rejected.status in {400, 413}
    assert "metrics" in ada.result(ada.post("optim_step", optim_step(run, 2))).json


@pytest.mark.parametrize("packed", ["zstd", "gzip"])
def test_a_compressed_pass_is_recorded_as_it_was_sent(packed: str, ada: Client, engine: Engine) -> None:
    run = ada.create()
    body = pass_body(run, 1, [300, 400] * 10)
    sent = {"zstd": zstandard.compress, "gzip": gzip.compress}[packed](body)
    accepted = send_pass(ada, sent, content_encoding=packed)
    assert ada.result(accepted).status == 200
    row = engine.store.journal.get(accepted.json["request_id"])
    assert row is not None
    assert row.body.endswith(sent) == (len(sent) + 32 < len(body))
    assert body_size(row.body) == len(body)
    assert expand(row.body) == body


@pytest.mark.parametrize("packed", ["", "zstd", "gzip"])
def test_a_pass_that_is_too_large_uses_up_its_seq_id(packed: str, ada: Client) -> None:
    run = ada.create()
    body = pass_body(run, 1, [300, 400] * 60_000)
    pack = {"": bytes, "zstd": zstandard.compress, "gzip": gzip.compress}[packed]
    rejected = send_pass(ada, pack(body), **({"content_encoding": packed} if packed else {}))
    assert rejected.status == 413
    assert "send less per request" in rejected.detail
    assert "metrics" in ada.result(ada.post("optim_step", optim_step(run, 2))).json
    announced = {"content_length": str(len(body))}
    assert send_pass(ada, pass_body(run, 3, [300, 400] * 60_000), **announced).status == 413
    large = {**optim_step(run, 4), "type": "x" * 300_000}
    assert ada.post("optim_step", large).status == 413
    assert "metrics" in ada.result(ada.post("optim_step", optim_step(run, 5))).json


@pytest.mark.parametrize("number", [2**31, 2**63 - 1, 2**63, -(2**63), 2**200])
def test_an_arbitrary_seq_id_never_blocks_a_run(number: int, ada: Client) -> None:
    run = ada.create()
    for body in (optim_step(run, number), {**optim_step(run, number), "adam_params": "none"}):
        rejected = ada.post("optim_step", body)
        assert rejected.status == 400
        assert rejected.detail
    unnumbered = {name: value for name, value in optim_step(run, 0).items() if name != "seq_id"}
    for body in (unnumbered, optim_step(run, 2)):
        assert "metrics" in ada.result(ada.post("optim_step", body)).json


@pytest.mark.parametrize("number", [2**31, 2**63, -1, -(2**63), 2**200])
@pytest.mark.parametrize("name", ["forward", "forward_backward"])
def test_a_json_pass_with_an_arbitrary_seq_id_is_rejected(name: str, number: int, ada: Client) -> None:
    run = ada.create()
    given = {"data": [], "loss_fn": "cross_entropy"}
    rejected = ada.post(name, {f"{name}_input": given, "model_id": run, "seq_id": number})
    assert (rejected.status, "seq_id" in rejected.detail) == (400, True)
    assert loss(ada, send_pass(ada, pass_body(run, 1))) > 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("learning_rate", 1e39), ("eps", 1e-46), ("weight_decay", 1e300)],
)
def test_adam_parameters_that_overflow_float32_are_rejected_and_the_weights_stay(
    name: str, value: float, ada: Client
) -> None:
    run = ada.create()
    before = loss(ada, send_pass(ada, pass_body(run, 1, forward_only=True)))
    step = optim_step(run, 2)
    rejected = ada.post("optim_step", {**step, "adam_params": {**step["adam_params"], name: value}})
    assert rejected.status == 400
    assert f"adam_params.{name}" in rejected.detail
    assert loss(ada, send_pass(ada, pass_body(run, 3, forward_only=True))) == before


def test_older_clients_send_json_to_the_same_paths(ada: Client) -> None:
    run = ada.create()
    expected = loss(ada, send_pass(ada, pass_body(run, 1, forward_only=True)))
    given = {
        "data": [
            {
                "model_input": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:-1]}]},
                "loss_fn_inputs": {"target_tokens": {"data": TOKENS[1:], "dtype": "int64", "shape": [4]}},
            }
        ],
        "loss_fn": "cross_entropy",
    }
    forward = ada.post("forward", {"forward_input": given, "model_id": run, "seq_id": 2})
    backward = ada.post("forward_backward", {"forward_backward_input": given, "model_id": run, "seq_id": 3})
    unnumbered = ada.post("forward_backward", {"forward_backward_input": given, "model_id": run})
    for submitted in (forward, backward, unnumbered):
        answer = ada.result(submitted, accept="application/json")
        assert answer.headers["content-type"] == "application/json"
        assert answer.json["metrics"]["loss:sum"] == pytest.approx(expected, rel=1e-5)
        (record,) = answer.json["loss_fn_outputs"]
        assert record["logprobs"]["dtype"] == "float32"
        assert record["logprobs"]["shape"] == [4]
        assert sum(record["logprobs"]["data"]) == pytest.approx(-expected, rel=1e-5)
    missing = ada.post("forward", {"model_id": run, "seq_id": 5})
    assert missing.status == 400
    assert "forward_input" in missing.detail
    assert loss(ada, send_pass(ada, pass_body(run, 6))) > 0


@pytest.mark.parametrize("place", ["call", "input", "datum"])
def test_an_unknown_json_field_is_rejected_with_its_name(place: str, ada: Client) -> None:
    datum: dict[str, Any] = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:-1]}]},
        "loss_fn_inputs": {"target_tokens": {"data": TOKENS[1:], "dtype": "int64", "shape": [4]}},
    }
    given: dict[str, Any] = {"data": [datum], "loss_fn": "cross_entropy"}
    call: dict[str, Any] = {"forward_backward_input": given, "model_id": ada.create(), "seq_id": 1}
    {"call": call, "input": given, "datum": datum}[place]["loss_scale"] = 2.0
    rejected = ada.post("forward_backward", call)
    assert rejected.status == 400
    assert "loss_scale" in rejected.detail


def test_the_data_of_another_endpoint_is_rejected(ada: Client) -> None:
    given = {"data": [], "loss_fn": "cross_entropy"}
    both = {"forward_backward_input": given, "forward_input": given, "model_id": ada.create(), "seq_id": 1}
    for name, other in (("forward", "forward_backward_input"), ("forward_backward", "forward_input")):
        rejected = ada.post(name, both)
        assert rejected.status == 400
        assert f"{other} belongs to another endpoint" in rejected.detail


def test_a_repeated_submission_returns_the_same_id(ada: Client) -> None:
    run = ada.create()
    assert send_pass(ada, pass_body(run, 1)).json == send_pass(ada, pass_body(run, 1)).json
    changed = send_pass(ada, pass_body(run, 1, [5, 6, 7]))
    assert changed.status == 400
    assert "other content" in changed.detail


def test_get_info_returns_a_directory_only_to_local_clients(ada: Client, bob: Client, engine: Engine) -> None:
    run = ada.create()
    info = ada.post("get_info", {"model_id": run, "type": "get_info"}).json
    directory = str(engine.models.find("tiny").info.directory)
    assert info["model_data"] == {"arch": "llama", "model_name": "tiny", "tokenizer_id": directory}
    assert (info["model_id"], info["is_lora"], info["lora_rank"]) == (run, True, 4)
    other = bob.create()
    assert bob.post("get_info", {"model_id": other}).json["model_data"]["tokenizer_id"] == "tiny"


def test_saving_and_loading_over_the_wire(ada: Client) -> None:
    session = ada.session()
    run = ada.create(session, train_unembed=False)
    save = {"model_id": run, "path": "0001", "seq_id": 1, "overwrite": False, "type": "save_weights"}
    path = ada.result(ada.post("save_weights", save)).json["path"]
    assert path == f"tinker://{run}/weights/0001"
    info = ada.post("weights_info", {"tinker_path": path}).json
    assert info == {
        "base_model": "tiny",
        "is_lora": True,
        "lora_rank": 4,
        "train_unembed": False,
        "train_mlp": True,
        "train_attn": True,
        "optimizer_config": {"type": "adamw"},
    }
    again = ada.post("save_weights", {**save, "seq_id": 2})
    assert again.status == 400
    assert "overwrite=True" in again.detail
    load = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True, "type": "load_weights"}
    assert ada.result(ada.post("load_weights", load)).json["model_id"] == f"{session}:train:1"
    unload = ada.post("unload_model", {"model_id": run})
    assert ada.result(unload).json["model_id"] == run
    repeated = ada.post("unload_model", {"model_id": run})  # a retry after a lost response
    assert repeated.json["request_id"] == unload.json["request_id"]
    expired = ada.post("optim_step", optim_step(run, 5))
    assert expired.status == 410
    assert path in expired.detail


def test_the_error_for_an_unknown_model_lists_the_served_ones(ada: Client) -> None:
    request = {
        "session_id": ada.session(),
        "model_seq_id": 0,
        "base_model": "nobody/has-this",
        "lora_config": {"rank": 4},
    }
    answer = ada.post("create_model", request)
    assert answer.status == 404
    assert "it serves: tiny" in answer.detail


def test_options_that_cannot_be_honoured_are_rejected(ada: Client) -> None:
    run = ada.create()
    step = {"model_id": run, "seq_id": 1, "optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}
    answer = ada.post("optim_step", step)
    assert answer.status == 400
    assert "dimuon" in answer.detail
    request = json.loads(json.dumps({"session_id": ada.session(), "model_seq_id": 0, "base_model": "tiny"}))
    request["lora_config"] = {"rank": 4, "dropout": 0.1}
    rejected = ada.post("create_model", request)
    assert rejected.status == 400
    assert "dropout" in rejected.detail
    request["lora_config"] = {"rank": 4, "seed": 2**64}
    rejected = ada.post("create_model", request)
    assert (rejected.status, "lora_config.seed" in rejected.detail) == (400, True)
