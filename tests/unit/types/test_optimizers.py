"""Optimizer families: known ones as their classes, others as they come."""

from __future__ import annotations

import copy
import pickle

import pytest

from tinkex import types
from tinkex._wire import json as wire_json


def test_a_known_family_is_read_as_its_class_and_another_keeps_its_fields() -> None:
    assert types.OptimizerConfigBase.model_validate({"type": "adamw"}) == types.AdamOptimizerConfig()
    assert isinstance(
        types.OptimizerConfigBase.model_validate({"type": "dimuon", "version": 1}),
        types.DimuonOptimizerConfig,
    )
    lion = types.OptimizerConfigBase.model_validate({"type": "lion", "warmup": 10})
    assert (lion.type, lion.warmup, lion["warmup"]) == ("lion", 10, 10)
    with pytest.raises(AttributeError, match="no field 'decay'"):
        _ = lion.decay
    with pytest.raises(ValueError, match="type"):
        types.OptimizerConfigBase.model_validate("adamw")
    with pytest.raises(ValueError, match="nesterov"):
        types.OptimizerConfigBase.model_validate({"type": "adamw", "nesterov": True})


def test_families_are_frozen_hashable_and_survive_copies() -> None:
    params = types.DimuonParams(learning_rate=0.02)
    with pytest.raises(AttributeError, match="frozen"):
        params.learning_rate = 1.0
    for again in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params), params.model_copy()):
        assert again == params
        assert isinstance(again, types.DimuonParams)
        assert hash(again) == hash(params)
    assert params.model_copy(update={"beta1": 0.5}).beta1 == 0.5
    assert repr(types.AdamOptimizerConfig()) == "AdamOptimizerConfig(type='adamw')"


@pytest.mark.parametrize(
    "wrong", [{"learning_rate": -1}, {"learning_rate": 1, "beta1": 1}, {"learning_rate": 1e999}]
)
def test_impossible_steps_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="DimuonParams"):
        types.DimuonParams(**wrong)  # type: ignore[arg-type]


def test_a_family_cannot_pose_as_another() -> None:
    with pytest.raises(ValueError, match="adamw"):
        types.AdamOptimizerConfig(type="dimuon")  # type: ignore[arg-type]


def test_families_travel_as_what_they_are() -> None:
    info = wire_json.decode(
        b'{"model_data": {}, "model_id": "m", "optimizer_config": {"type": "dimuon", "version": 1}}',
        types.GetInfoResponse,
    )
    assert info.optimizer_config == types.DimuonOptimizerConfig()
    assert b'"optimizer_config":{"type":"dimuon","version":1}' in wire_json.encode(info)
    assert (
        wire_json.decode(b'{"model_data": {}, "model_id": "m"}', types.GetInfoResponse).optimizer_config.type
        == "adamw"
    )
    request = types.CreateModelRequest(
        session_id="s", model_seq_id=0, base_model="toy", optimizer_config=types.DimuonOptimizerConfig()
    )
    assert b'"optimizer_config":{"type":"dimuon","version":1}' in wire_json.encode(request)
    step = types.OptimStepRequest(model_id="m", optimizer_params=types.DimuonParams(learning_rate=0.5))
    assert isinstance(step.optim_params, types.DimuonParams)
    assert (
        types.OptimStepRequest(model_id="m", adam_params=types.AdamParams()).optim_params
        == types.AdamParams()
    )
