"""Our values against the official package's: any instance reads and writes the same JSON."""

from __future__ import annotations

import copy
import inspect
import pickle
import types as pytypes
import typing
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import hypothesis.strategies as st
import msgspec
import pydantic
import pytest
import tinker
import tinker.types
from hypothesis import HealthCheck, given, settings
from tinker.types.optimizer import OptimizerConfigBase, OptimParamsBase

import tinkex
import tinkex.types
from tinkex._wire import json as wire_json
from tinkex.types.base import Value

NOT_THE_SAME_SHAPE = {
    "OptimStepRequest": "ours holds the two fields that travel; the official one folds them into one",
    "ModelInput": "compared through SampleRequest",
    "TelemetryBatch": "events are not read",
    "TelemetrySendRequest": "events are not read",
}
FIELDS: dict[tuple[str, str], st.SearchStrategy[Any]] = {
    ("LoraConfig", "rank"): st.integers(1, 512),
    ("LoraConfig", "train_mlp"): st.sampled_from([True]),
    ("CreateSessionRequest", "user_metadata"): st.dictionaries(st.text("abc"), st.text("abc"), max_size=2),
    ("SessionSearchRequest", "statuses"): st.none(),
    ("SampleRequest", "target_prompt_logprobs"): st.none(),
    ("AdamParams", "learning_rate"): st.floats(0, 1),
    ("AdamParams", "beta1"): st.floats(0, 0.999),
    ("AdamParams", "beta2"): st.floats(0, 0.999),
    ("AdamParams", "eps"): st.floats(1e-12, 1),
    ("AdamParams", "weight_decay"): st.floats(0, 1),
    ("AdamParams", "grad_clip_norm"): st.floats(0, 1),
    ("DimuonParams", "beta1"): st.floats(0, 0.999),
    ("SamplingParams", "max_tokens"): st.integers(1, 1000),
    ("SamplingParams", "temperature"): st.floats(0, 2),
    ("SamplingParams", "top_k"): st.integers(1, 100),
    ("SamplingParams", "top_p"): st.floats(0.1, 1),
    ("EncodedTextChunk", "tokens"): st.lists(st.integers(0, 2**31 - 1), max_size=8),
    ("SessionSearchRequest", "limit"): st.integers(1, 200),
    ("SessionSearchRequest", "display_name"): st.text("abc", min_size=1),
    ("UserSearchOwner", "owner_urns"): st.lists(st.text("abc"), min_size=1, max_size=10),
    ("ClientFinishedSessionStatusQuery", "reasons"): st.lists(
        st.sampled_from(["success", "errored", "interrupted"]), min_size=1, max_size=3
    ),
}
"""Where a value is restricted: by both packages, or by ours (see docs/surface.md)."""


def pairs() -> list[tuple[str, type[pydantic.BaseModel], type[Any]]]:
    return [
        (name, official, getattr(tinkex.types, name))
        for name, official in inspect.getmembers(tinker.types, inspect.isclass)
        if issubclass(official, pydantic.BaseModel) and name not in NOT_THE_SAME_SHAPE
    ]


def values(annotation: Any) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return values(arguments[0])
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in {typing.Union, pytypes.UnionType}:
        return st.one_of([values(a) for a in arguments])
    if annotation is Any or annotation is object:
        return st.one_of(st.text("ab"), st.integers(0, 9), st.none())
    if origin in {list, typing.get_origin(typing.Sequence[int])}:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(st.text("abc", min_size=1), values(arguments[1]), max_size=2)
    if annotation is pydantic.AwareDatetime or annotation is datetime:
        return st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1)).map(lambda d: d.replace(tzinfo=UTC))  # noqa: DTZ001
    if annotation in {OptimizerConfigBase, OptimParamsBase}:
        return st.builds(annotation, type=st.just("newton"), order=st.integers(1, 3))
    if inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel):
        return instances(annotation)
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        return st.sampled_from(list(annotation))
    simple = {
        str: st.text("abcé/:", max_size=6),
        int: st.integers(0, 10**9),
        float: st.floats(0, 1e6),
        bool: st.booleans(),
        bytes: st.binary(max_size=8),
        type(None): st.none(),
    }
    return simple[annotation]


def instances(kind: type[pydantic.BaseModel]) -> st.SearchStrategy[Any]:
    fields: dict[str, st.SearchStrategy[Any]] = {}
    left_out: dict[str, st.SearchStrategy[Any]] = {}
    for name, field in kind.model_fields.items():
        place = (kind.__name__, name)
        strategy = FIELDS[place] if place in FIELDS else values(field.annotation)
        (fields if field.is_required() else left_out)[name] = strategy
    return st.fixed_dictionaries(fields, optional=left_out).map(lambda chosen: kind(**chosen))


def as_of_036(plain: Any) -> Any:
    """A dump of ours without the fields of later versions that are never None."""
    if isinstance(plain, dict):
        later = {"free"} if plain.get("type") == "storage" else set()
        return {name: as_of_036(value) for name, value in plain.items() if name not in later}
    return [as_of_036(each) for each in plain] if isinstance(plain, list) else plain


def contains(ours: Any, theirs: Any) -> bool:
    """Whether everything of theirs is in ours, which may have further fields."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return all(name in ours and contains(ours[name], value) for name, value in theirs.items())
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(contains, ours, theirs))
    return bool(ours == theirs)


@pytest.mark.parametrize(("name", "official", "ours"), pairs(), ids=lambda p: p if isinstance(p, str) else "")
def test_json_is_the_same_in_both_directions(
    name: str, official: type[pydantic.BaseModel], ours: type[Any]
) -> None:
    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(instances(official))
    def same(theirs: pydantic.BaseModel) -> None:
        written = theirs.model_dump(mode="json", exclude_none=True)
        mine = ours.model_validate(written)
        assert as_of_036(mine.model_dump(mode="json", exclude_none=True)) == written
        assert official.model_validate(mine.model_dump(mode="json", exclude_none=True)) == theirs
        if issubclass(ours, Value):
            assert as_of_036(msgspec.json.decode(wire_json.encode(mine))) == written
            assert ours.model_validate_json(mine.model_dump_json()) == mine
        assert pickle.loads(pickle.dumps(mine)) == mine
        assert copy.deepcopy(mine) == mine
        everything = theirs.model_dump(mode="json")
        assert contains(mine.model_dump(mode="json"), everything)

    same()


def test_status_queries_are_read_as_their_classes() -> None:
    asked = {"statuses": [{"type": "active"}, {"type": "client_finished", "reasons": ["errored"]}]}
    mine = tinkex.types.SessionSearchRequest.model_validate(asked)
    theirs = tinker.types.SessionSearchRequest.model_validate(asked)
    assert mine.statuses is not None
    assert theirs.statuses is not None
    assert [type(s).__name__ for s in mine.statuses] == [type(s).__name__ for s in theirs.statuses]
    assert mine.model_dump(mode="json", exclude_none=True) == theirs.model_dump(
        mode="json", exclude_none=True
    )


@pytest.mark.parametrize("name", sorted(NOT_THE_SAME_SHAPE))
def test_every_exception_is_still_a_type(name: str) -> None:
    assert hasattr(tinker.types, name)
    assert hasattr(tinkex.types, name)


@given(instances(tinker.types.OptimStepRequest))
@settings(max_examples=20, deadline=None, database=None)
def test_an_optimizer_step_travels_in_the_same_form(theirs: Any) -> None:
    written = theirs.model_dump(mode="json", exclude_none=True)
    mine = tinkex.types.OptimStepRequest.model_validate(written)
    assert mine.model_dump(mode="json", exclude_none=True) == written
    assert mine.optim_params.model_dump() == theirs.optim_params.model_dump()


def test_pages_of_checkpoints_have_the_same_addresses() -> None:
    path = "tinker://s:train:0/sampler_weights/a b"
    for method in ("get_console_url", "get_playground_url"):
        theirs = getattr(tinker.types.SaveWeightsForSamplerResponse(path=path), method)()
        assert getattr(tinkex.types.SaveWeightsForSamplerResponse(path=path), method)() == theirs


def test_values_are_fields_of_a_programs_own_pydantic_models() -> None:
    def experiment(package: Any) -> Any:
        class Experiment(pydantic.BaseModel):
            prompt: package.ModelInput
            optimizer: package.AdamParams = package.AdamParams()
            sampling: package.SamplingParams | None = None

        return Experiment

    written = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling": {"max_tokens": 5, "stop": ["a"]},
    }
    theirs, ours = (experiment(package).model_validate(written) for package in (tinker, tinkex))
    assert isinstance(ours.prompt, tinkex.ModelInput)
    assert ours.sampling.max_tokens == 5
    for options in ({}, {"mode": "json"}, {"mode": "json", "exclude_none": True}):
        assert ours.model_dump(**options) == theirs.model_dump(**options)
    built = experiment(tinkex)(prompt=tinkex.ModelInput.from_ints([1, 2]))
    assert type(built).model_validate_json(built.model_dump_json()) == built
    with pytest.raises(pydantic.ValidationError, match="rank"):
        pydantic.TypeAdapter(tinkex.types.LoraConfig).validate_python({"rank": 0})
