from __future__ import annotations

from typing import Any

import pytest

from tinkex._wire import proto as wire_proto
from tinkex.engine.intake.fingerprint import fingerprint
from tinkex.types import Datum, ForwardBackwardRequest, ModelInput, SaveWeightsForSamplerRequest, TensorData


def request(**changes: Any) -> ForwardBackwardRequest:
    inputs = {
        "target_tokens": TensorData(data=[2, 3], dtype="int64"),
        "weights": TensorData(data=[1.0, 0.5], dtype="float32"),
    }
    values: dict[str, Any] = {
        "model_id": "run",
        "seq_id": 1,
        "data": [Datum(ModelInput.from_ints([1, 2]), inputs)],
        "loss_fn": "ppo",
        "loss_fn_config": {"a": 1.0, "b": 2.0},
    }
    return ForwardBackwardRequest(**{**values, **changes})


def test_the_order_of_maps_and_the_spelling_on_the_wire_do_not_matter() -> None:
    turned = dict(reversed(request().data[0].loss_fn_inputs.items()))
    same = request(data=[Datum(ModelInput.from_ints([1, 2]), turned)], loss_fn_config={"b": 2.0, "a": 1.0})
    decoded = wire_proto.decode_forward_backward(wire_proto.encode_forward_backward(same))
    assert fingerprint(request()) == fingerprint(same)
    assert fingerprint(decoded) == fingerprint(
        wire_proto.decode_forward_backward(wire_proto.encode_forward_backward(request()))
    )


@pytest.mark.parametrize(
    "change",
    [
        {"seq_id": 2},
        {"loss_fn": "cispo"},
        {"loss_fn_config": {"a": 1.5, "b": 2.0}},
        {"forward_only": True},
        {"data": []},
        {"data": [Datum(ModelInput.from_ints([1, 3]), request().data[0].loss_fn_inputs)]},
        {
            "data": [
                Datum(ModelInput.from_ints([1, 2]), {"target_tokens": TensorData(data=[2, 3], dtype="int64")})
            ]
        },
        {"data": [*request().data, *request().data]},
    ],
)
def test_any_other_content_is_another_fingerprint(change: dict[str, Any]) -> None:
    assert fingerprint(request(**change)) != fingerprint(request())


def test_a_retried_unnamed_save_is_the_same_request() -> None:
    def save(number: int) -> SaveWeightsForSamplerRequest:
        return SaveWeightsForSamplerRequest(model_id="m", seq_id=1, sampling_session_seq_id=number)

    assert fingerprint(save(0)) == fingerprint(save(1))
    named = SaveWeightsForSamplerRequest(model_id="m", seq_id=1, path="p")
    assert fingerprint(named) != fingerprint(save(0))
