from __future__ import annotations

from typing import Any

import pytest

from tinkex._wire import proto as wire_proto
from tinkex.engine.intake.fingerprint import fingerprint
from tinkex.types import (
    Datum,
    ForwardBackwardRequest,
    ModelInput,
    SampleRequest,
    SamplingParams,
    SaveWeightsForSamplerRequest,
    TensorData,
)


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


def sample(**params: Any) -> SampleRequest:
    return SampleRequest(
        prompt=ModelInput.from_ints([1, 2]),
        sampling_params=SamplingParams(max_tokens=3, stop=["a"], **params),
        seq_id=4,
        sampling_session_id="s:sample:0",
    )


def test_a_sample_recorded_before_an_option_existed_is_recognised() -> None:
    assert fingerprint(sample()).hex() == "2525b8f13cf79ef20dd0cfc534ce8042"


def test_every_option_of_a_sample_counts_and_the_order_of_biases_does_not() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"min_p": 0.1},
        {"presence_penalty": 0.1},
        {"logit_bias": {1: 1.0, 2: 2.0}},
        {"logit_bias": {1: 1.0, 2: 2.5}},
        {"structured_output": {"regex": "a"}},
        {"structured_output": {"grammar": "a"}},
    ]
    assert len({fingerprint(sample(**each)) for each in options}) == len(options)
    assert fingerprint(sample(logit_bias={2: 2.0, 1: 1.0})) == fingerprint(sample(**options[3]))
