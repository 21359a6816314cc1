from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tinker
import torch

from tinkex import types


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (types.AdamParams, {"learning_rate": -1.0}, "learning_rate"),
        (types.AdamParams, {"learning_rate": float("nan")}, "learning_rate"),
        (types.AdamParams, {"beta1": 1.0}, "beta1"),
        (types.AdamParams, {"eps": 0.0}, "eps"),
        (types.LoraConfig, {"rank": 0}, "rank"),
        (
            types.LoraConfig,
            {"rank": 1, "train_mlp": False, "train_attn": False, "train_unembed": False},
            "at least one",
        ),
        (types.SamplingParams, {"max_tokens": 0}, "max_tokens"),
        (types.SamplingParams, {"temperature": -0.1}, "temperature"),
        (types.SamplingParams, {"top_k": 0}, "top_k"),
        (types.SamplingParams, {"top_p": 0.0}, "top_p"),
        (types.SamplingParams, {"stop": ["a", 1]}, "mixes"),
        (types.SamplingParams, {"stop": 3}, "a list of token ids"),
        (types.SamplingParams, {"stop": [1.5]}, "a list of token ids"),
        (types.SamplingParams, {"max_tokens": 5.5}, "must be an integer"),
        (types.SamplingParams, {"top_k": None}, "must be an integer"),
        (types.SamplingParams, {"temperature": "hot"}, "must be a number"),
        (types.AdamParams, {"learning_rate": None}, "must be a number"),
    ],
)
def test_wrong_settings_are_rejected_with_an_error_that_names_them(
    kind: type, wrong: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**wrong)


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5), "0.5"])
def test_numbers_of_any_kind_become_those_the_official_client_makes_of_them(number: Any) -> None:
    for kind, name in ((types.AdamParams, "learning_rate"), (types.SamplingParams, "temperature")):
        made = getattr(kind(**{name: number}), name)
        theirs = getattr(getattr(tinker, kind.__name__)(**{name: number}), name)
        assert (type(made), made) == (type(theirs), theirs)


@pytest.mark.parametrize("number", [np.int64(5), 5.0, "5"])
def test_whole_numbers_of_any_kind_become_ints(number: Any) -> None:
    made, theirs = types.SamplingParams(max_tokens=number), tinker.SamplingParams(max_tokens=number)
    assert (type(made.max_tokens), made.max_tokens) == (type(theirs.max_tokens), theirs.max_tokens)
    assert types.SamplingParams(stop=np.array([1, 2])).stop == [1, 2]  # type: ignore[arg-type]


def test_unknown_options_are_rejected() -> None:
    with pytest.raises(TypeError, match="beam_width"):
        types.SamplingParams(beam_width=4)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="beam_width"):
        types.SamplingParams.model_validate({"beam_width": 4})


def test_a_tag_may_be_given_like_in_the_official_client() -> None:
    owner = types.UserSearchOwner(type="user", owner_urns=["a"])  # type: ignore[call-arg]
    assert owner == types.UserSearchOwner(owner_urns=["a"])
    assert owner.model_dump() == tinker.types.UserSearchOwner(type="user", owner_urns=["a"]).model_dump()
    request = types.CheckpointSearchRequest(owner=types.OwnSearchOwner(type="own"))  # type: ignore[call-arg]
    assert request == types.CheckpointSearchRequest()
    with pytest.raises(ValueError, match=r"OwnSearchOwner.type is 'own', got 'user'"):
        types.OwnSearchOwner(type="user")  # type: ignore[call-arg]


def test_defaults_are_those_of_the_official_client() -> None:
    for ours, theirs in (
        (types.AdamParams(), tinker.AdamParams()),
        (types.SamplingParams(), tinker.SamplingParams()),
        (types.LoraConfig(rank=32), tinker.LoraConfig(rank=32)),
    ):
        assert ours.model_dump() == theirs.model_dump()


def test_a_copy_can_change_fields_and_is_frozen() -> None:
    params = types.AdamParams().model_copy(update={"learning_rate": 0.1})
    assert params.learning_rate == 0.1
    with pytest.raises(AttributeError):
        params.learning_rate = 0.2  # type: ignore[misc]


@pytest.mark.parametrize(
    "path",
    [
        "run/weights/a",
        "tinker://run/a",
        "tinker://run/other/a",
        "tinker://run/weights/a/b",
        "tinker:///weights/a",
    ],
)
def test_only_true_checkpoint_paths_parse(path: str) -> None:
    with pytest.raises(ValueError, match="tinker://<run>/weights/<name>"):
        types.ParsedCheckpointTinkerPath.from_tinker_path(path)


def test_a_checkpoint_path_is_taken_apart_like_the_official_one() -> None:
    path = "tinker://sess:train:0/sampler_weights/000004"
    ours = types.ParsedCheckpointTinkerPath.from_tinker_path(path)
    assert ours.model_dump() == tinker.ParsedCheckpointTinkerPath.from_tinker_path(path).model_dump()
