"""Custom losses: idempotent uploads, ownership and exact gradients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.engine.api.asgi import PROTO, Answer, Client
from tests.unit.engine.api.test_training import TOKENS, optim_step, pass_body, send_pass
from tinkex._wire import proto as wire_proto
from tinkex.types import Datum, ForwardBackwardRequest, ModelInput

INPUTS = [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}]
NODES: list[dict[str, Any]] = [
    {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},
    {"op": "placeholder", "name": "weights", "target": "weights", "args": [], "kwargs": {}},
    {"op": "call_function", "name": "mul", "target": "operator.mul", "args": [{"ref": "logprobs"}, {"ref": "weights"}], "kwargs": {}},
    {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "mul"}], "kwargs": {}},
    {"op": "call_function", "name": "neg", "target": "operator.neg", "args": [{"ref": "total"}], "kwargs": {}},
    {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "neg"}, {"dict": {}}]}], "kwargs": {}},
]  # fmt: skip


def definition(session: str, number: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "session_id": session,
        "custom_loss_seq_id": number,
        "name": "neg_ll",
        "inputs": INPUTS,
        "graph": {"format": 1, "nodes": NODES},
        "type": "create_custom_loss",
        **changes,
    }


def custom_pass(run: str, seq_id: int, loss_id: str | float | None) -> bytes:
    inputs: dict[str, Any] = {"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)}
    config = {"loss_id": loss_id} if loss_id is not None else None
    data = [Datum(ModelInput.from_ints(TOKENS[:-1]), inputs)]
    return wire_proto.encode_forward_backward(ForwardBackwardRequest(run, seq_id, data, "custom", config))


def metrics(client: Client, submitted: Answer) -> dict[str, float]:
    answer = client.result(submitted, accept=PROTO)
    assert answer.headers["content-type"] == PROTO, answer.body
    return wire_proto.decode_forward_backward_output(answer.body).metrics


def test_an_uploaded_loss_trains_like_the_built_in_one(ada: Client) -> None:
    session = ada.session()
    loss_id = ada.result(ada.post("create_custom_loss", definition(session))).json["loss_id"]
    norms, losses = [], []
    for number, body in enumerate((custom_pass, pass_body)):
        run = ada.create(session, number)
        sent = body(run, 1, loss_id) if body is custom_pass else pass_body(run, 1)
        losses.append(metrics(ada, send_pass(ada, sent))["loss:sum"])
        step = ada.result(ada.post("optim_step", optim_step(run, 2))).json["metrics"]
        norms.append([value for name, value in step.items() if "norm" in name])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_repeated_upload_returns_the_same_loss(ada: Client) -> None:
    session = ada.session()
    first = ada.post("create_custom_loss", definition(session))
    again = ada.post("create_custom_loss", definition(session))
    assert again.json["request_id"] == first.json["request_id"]
    other = ada.post("create_custom_loss", definition(session, name="another"))
    assert other.status == 400
    ids = {ada.result(ada.post("create_custom_loss", definition(session, n))).json["loss_id"] for n in (0, 1)}
    assert len(ids) == 2


def test_a_graph_with_a_forbidden_operation_is_rejected_with_its_node(ada: Client) -> None:
    bad = [*NODES[:2], {**NODES[2], "target": "os.system"}, *NODES[3:]]
    answer = ada.post("create_custom_loss", definition(ada.session(), graph={"format": 1, "nodes": bad}))
    assert answer.status == 400
    assert "os.system" in answer.detail


def test_a_pass_can_use_only_losses_of_its_own_user(ada: Client, bob: Client) -> None:
    session = ada.session()
    loss_id = ada.result(ada.post("create_custom_loss", definition(session))).json["loss_id"]
    assert bob.post("create_custom_loss", definition(session)).status == 404
    run = bob.create()
    for seq_id, (named, status) in enumerate([(loss_id, 404), ("nonsense", 404), (None, 400), (3.0, 400)], 1):
        answer = send_pass(bob, custom_pass(run, seq_id, named))
        assert answer.status == status, answer.body
        assert "loss" in answer.detail
    # Rejected seq_ids are used up, and the run continues.
    assert metrics(bob, send_pass(bob, pass_body(run, 5)))["loss:sum"] > 0
