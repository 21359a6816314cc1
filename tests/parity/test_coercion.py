"""What programs hand over in other forms is read alike: dictionaries, texts, numpy and torch numbers, tuples."""

from __future__ import annotations

import copy
import decimal
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker
import torch

import tinkex
from tinkex.types.sampling import SAMPLING_EXTENSIONS

CHECKPOINT = {
    "checkpoint_id": "weights/1",
    "checkpoint_type": "training",
    "time": "2026-01-01T00:00:00Z",
    "tinker_path": "tinker://r/weights/1",
}
RUN = {
    "training_run_id": "r",
    "base_model": "b",
    "model_owner": "o",
    "is_lora": True,
    "lora_rank": "8",
    "last_request_time": 1_700_000_000,
    "last_checkpoint": CHECKPOINT,
}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": (1, np.int64(2))}]}

CASES: dict[str, Callable[[Any], Any]] = {
    **{
        f"{name}={value!r}": lambda types, name=name, value=value: types.SamplingParams(**{name: value})
        for name, value in [
            ("max_tokens", "5"),
            ("max_tokens", "5.0"),
            ("max_tokens", 5.0),
            ("max_tokens", np.int32(5)),
            ("max_tokens", torch.tensor(5)),
            ("seed", decimal.Decimal(5)),
            ("temperature", "0.5"),
            ("temperature", np.float32(0.5)),
            ("temperature", torch.tensor(0.5)),
            ("top_k", True),
            ("top_p", 1),
        ]
    },
    **{
        f"{name}={value!r}": lambda types, name=name, value=value: types.LoraConfig(
            **{"rank": 4, name: value}
        )
        for name, value in [
            ("rank", "8"),
            ("rank", 8.0),
            ("rank", np.int64(8)),
            ("rank", torch.tensor(8)),
            ("seed", "3"),
            ("seed", np.int64(3)),
            ("train_mlp", 0),
            ("train_mlp", "false"),
            ("train_mlp", np.bool_(0)),
        ]
    },
    "adam": lambda types: types.AdamParams(
        learning_rate="1e-3", beta1=np.float64(0.5), eps=decimal.Decimal("0.5")
    ),
    "dimuon": lambda types: types.DimuonParams(
        learning_rate="0.5", grad_clip_norm=1, beta1=torch.tensor(0.5)
    ),
    "numpy items": lambda types: types.ModelInput.from_ints([np.int64(1), np.int32(2)]),
    "torch items": lambda types: types.ModelInput.from_ints(list(torch.tensor([1, 2]))),
    "whole floats": lambda types: types.ModelInput.from_ints([1.0, 2.0]),
    "texts of ids": lambda types: types.ModelInput.from_ints(["1", "2"]),
    "one more id": lambda types: types.ModelInput.from_ints([1]).append_int(torch.tensor(2)),
    "chunks of dictionaries": lambda types: types.ModelInput(
        chunks=[{"type": "encoded_text", "tokens": [1]}]
    ),
    "image": lambda types: types.ImageChunk(data=bytearray(b"ab"), format="png", expected_tokens="3"),
    "image of text": lambda types: types.ImageChunk(
        data="aGVs\nbG8=", format="jpeg", expected_tokens=np.int64(3)
    ),
    "audio of text": lambda types: types.DmelChunk(dmel="AQIFAw=="),
    "sample": lambda types: types.SampleRequest(
        prompt=PROMPT, sampling_params={"max_tokens": "5"}, num_samples=2.0
    ),
    "settings of a sample": lambda types: (
        types.SampleRequest(prompt=PROMPT, sampling_params={"stop": ["a"]}).sampling_params
    ),
    "new run": lambda types: (
        types.CreateModelRequest(
            session_id="s", model_seq_id="0", base_model="b", lora_config={"rank": "3"}
        ).lora_config
    ),
    "checkpoint": lambda types: types.Checkpoint(**CHECKPOINT),
    "run": lambda types: types.TrainingRun(**RUN),
    "checkpoint of a run": lambda types: types.TrainingRun(**RUN).last_checkpoint,
    "page of runs": lambda types: types.TrainingRunsResponse(
        training_runs=[RUN], cursor={"offset": 0, "limit": 1, "total_count": "1"}
    ),
    "models": lambda types: types.GetServerCapabilitiesResponse(supported_models=[{"model_name": "m"}]),
    "info": lambda types: types.GetInfoResponse(model_data={"model_name": "m"}, model_id="i"),
    "search": lambda types: types.SessionSearchRequest(
        owner={"type": "own"}, limit="5", statuses=[{"type": "active"}]
    ),
    "copy": lambda types: copy.copy(types.TrainingRun(**RUN)),
    "pickle": lambda types: pickle.loads(pickle.dumps(types.TrainingRun(**RUN))),
    "constructed": lambda types: types.SamplingParams.model_construct(max_tokens=5),
    "updated": lambda types: types.SamplingParams(max_tokens=5).model_copy(update={"temperature": 0.5}),
}


@pytest.mark.parametrize("case", CASES)
def test_both_read_the_same(case: str) -> None:
    theirs, ours = (CASES[case](package.types) for package in (tinker, tinkex))
    assert type(ours).__name__ == type(theirs).__name__
    mine, official = ours.model_dump(mode="json"), theirs.model_dump(mode="json")
    if case == "models":  # ours have further fields, which some servers send
        mine = {"supported_models": [{k: one[k] for k in two} for one, two in zip(
            mine["supported_models"], official["supported_models"], strict=True)]}  # fmt: skip
    mine = without_newer_fields(mine)
    assert mine == official
    assert types_of(mine) == types_of(official)


NEWER_FIELDS = {"Checkpoint": {"base_model"}}
"""Fields that the official client has since 0.39."""


def without_newer_fields(dumped: Any) -> Any:
    """The dump of a value without the fields of checkpoints that the official client does not have."""
    if isinstance(dumped, list):
        return [without_newer_fields(item) for item in dumped]
    if not isinstance(dumped, dict):
        return dumped
    newer = NEWER_FIELDS["Checkpoint"] if "checkpoint_type" in dumped else set()
    return {name: without_newer_fields(value) for name, value in dumped.items() if name not in newer}


REJECTED: dict[str, Callable[[Any], Any]] = {
    "fraction": lambda types: types.SamplingParams(max_tokens=5.5),
    "word": lambda types: types.LoraConfig(rank="many"),
    "nothing": lambda types: types.LoraConfig(rank=None),
    "flag": lambda types: types.LoraConfig(rank=4, train_mlp="perhaps"),
    "infinite": lambda types: types.LoraConfig(rank=float("inf")),
    "kind": lambda types: types.Checkpoint(**{**CHECKPOINT, "checkpoint_type": "other"}),
    "time": lambda types: types.Checkpoint(**{**CHECKPOINT, "time": "soon"}),
    "format": lambda types: types.ImageChunk(data=b"", format="gif"),
    "no image": lambda types: types.ImageChunk(data=None, format="png"),
    "type": lambda types: types.EncodedTextChunk(tokens=[1], type="image"),
    "bytes": lambda types: types.ModelInput.from_ints(b"ab"),
    "text": lambda types: types.ModelInput.from_ints("12"),
    "set": lambda types: types.ModelInput.from_ints({1, 2}),
    "field": lambda types: types.ModelInput.model_validate({"chunks": [], "more": 1}),
    "nested": lambda types: types.SampleRequest(prompt=PROMPT, sampling_params={"max_tokens": "few"}),
    "list": lambda types: types.TrainingRunsResponse(training_runs=[1], cursor=None),
}


@pytest.mark.parametrize("case", REJECTED)
def test_both_reject_the_same_as_a_value_error(case: str) -> None:
    for package in (tinker, tinkex):
        with pytest.raises(ValueError):
            REJECTED[case](package.types)


@pytest.mark.parametrize("name", ["SamplingParams", "AdamParams", "LoraConfig", "Checkpoint", "TrainingRun"])
def test_fields_and_defaults_can_be_looked_up(name: str) -> None:
    theirs, ours = (getattr(package.types, name).model_fields for package in (tinker, tinkex))
    assert set(ours) - set(SAMPLING_EXTENSIONS) - NEWER_FIELDS.get(name, set()) == set(theirs)
    for field in theirs:
        assert ours[field].is_required() == theirs[field].is_required()
        if not theirs[field].is_required():
            assert ours[field].get_default(call_default_factory=True) == theirs[field].get_default(
                call_default_factory=True
            )


def test_dictionaries_of_values_are_made_in_the_same_ways() -> None:
    def read(types: Any) -> list[Any]:
        params = types.SamplingParams(max_tokens=5, stop=["a"])
        prompt = types.ModelInput.from_ints([1]).append(types.ImageChunk(data=b"\x89PN", format="png"))
        return [
            dict(params),
            params.model_dump(exclude_defaults=True),
            params.model_dump(by_alias=True),
            prompt.model_dump(),
            prompt.model_dump(exclude_defaults=True),
            list(dict(prompt)),
            types.ModelInput.model_validate(prompt.model_dump()) == prompt,
            types.DimuonParams(learning_rate=0.5).model_dump_json(),
        ]

    assert read(tinkex.types) == read(tinker.types)


def types_of(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {name: types_of(item) for name, item in plain.items()}
    if isinstance(plain, list):
        return [types_of(item) for item in plain]
    return float if isinstance(plain, float) or plain in (-1, 1) else type(plain)
