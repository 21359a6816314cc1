"""The fields of ``SamplingParams`` that the official service does not have."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from tinkex import types
from tinkex._wire import json
from tinkex.types.sampling import MAX_SCHEMA_DEPTH, SAMPLING_EXTENSIONS

OPTIONS: dict[str, Any] = {
    "min_p": 0.1,
    "presence_penalty": -2.0,
    "frequency_penalty": 2.0,
    "repetition_penalty": 1.5,
    "logit_bias": {7: -100.0, 8: 1.5},
    "structured_output": types.StructuredOutput(json_schema={"type": "object", "default": None}),
}


def test_options_that_are_not_set_are_nowhere_to_be_seen() -> None:
    params = types.SamplingParams(max_tokens=4)
    assert params.extensions() == []
    for shown in (dict(params), params.model_dump(), json.decode(json.encode(params), dict[str, Any])):
        assert not set(shown) & set(SAMPLING_EXTENSIONS)
    request = types.SampleRequest(prompt=types.ModelInput.from_ints([1]), sampling_params=params)
    assert not set(request.model_dump()["sampling_params"]) & set(SAMPLING_EXTENSIONS)


def test_options_survive_the_wire_pickling_and_copies() -> None:
    params = types.SamplingParams(**OPTIONS)
    assert params.extensions() == list(SAMPLING_EXTENSIONS) == list(OPTIONS)
    assert json.decode(json.encode(params), types.SamplingParams) == params
    assert types.SamplingParams.model_validate(params.model_dump(mode="json")) == params
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params.model_copy() == params


def test_a_null_inside_a_schema_is_kept() -> None:
    sent = json.decode(json.encode(types.SamplingParams(**OPTIONS)), dict[str, Any])
    assert sent["structured_output"] == {"json_schema": {"type": "object", "default": None}}


def test_values_are_coerced_and_copied() -> None:
    bias = {"7": "1.5", np.int64(8): np.float32(2.0)}
    params = types.SamplingParams(
        min_p="0.5",  # type: ignore[arg-type]
        logit_bias=bias,  # type: ignore[arg-type]
        structured_output={"regex": "a"},  # type: ignore[arg-type]
    )
    bias.clear()
    assert (params.min_p, params.logit_bias) == (0.5, {7: 1.5, 8: 2.0})
    assert params.structured_output == types.StructuredOutput(regex="a")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 101}, "repetition_penalty"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, r"logit_bias\[1\]"),
        ({"logit_bias": {1: float("nan")}}, r"logit_bias\[1\]"),
        ({"logit_bias": {"one": 1.0}}, "logit_bias"),
        ({"logit_bias": [1.0]}, "logit_bias"),
        ({"structured_output": {}}, "nothing"),
        ({"structured_output": {"regex": "a", "grammar": "b"}}, "regex and grammar"),
        ({"structured_output": {"json_schema": False}}, "json_schema"),
        ({"structured_output": {"xml": "a"}}, "xml"),
    ],
)
def test_invalid_values_are_rejected_with_an_error_that_names_the_field(
    given: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        types.SamplingParams(**given)


def test_a_schema_that_is_nested_too_deeply_is_rejected() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(MAX_SCHEMA_DEPTH - 1):
        schema = {"items": schema}
    types.StructuredOutput(json_schema=schema)
    with pytest.raises(ValueError, match="deeper than 64"):
        types.StructuredOutput(json_schema={"items": schema})
