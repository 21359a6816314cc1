"""The pydantic-style methods of values."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from tinkex import types

WHEN = datetime(2026, 11, 15, 12, tzinfo=UTC)


def checkpoint(**more: object) -> types.Checkpoint:
    return types.Checkpoint.model_validate(
        {
            "checkpoint_id": "weights/1",
            "checkpoint_type": "training",
            "time": WHEN,
            "tinker_path": "p",
            **more,
        }
    )


def test_none_is_left_out_at_every_depth_but_kept_in_the_users_own_dictionaries() -> None:
    page = types.CheckpointsListResponse(checkpoints=[checkpoint(user_metadata={"a": None})])
    dumped = page.model_dump(exclude_none=True)
    assert dumped["checkpoints"][0].keys() == {
        "checkpoint_id",
        "checkpoint_type",
        "time",
        "tinker_path",
        "public",
        "user_metadata",
    }
    assert dumped["checkpoints"][0]["user_metadata"] == {"a": None}
    assert "cursor" in page.model_dump()


def test_dates_stay_dates_outside_json_mode_and_bytes_are_text() -> None:
    assert checkpoint().model_dump()["time"] == WHEN
    assert checkpoint().model_dump(mode="json")["time"] == "2026-11-15T12:00:00Z"
    image = types.ImageChunk(data=b"\x89PNG", format="png")
    assert image.model_dump()["data"] == "iVBORw=="
    assert image.model_dump(mode="json")["data"] == "iVBORw=="


def test_fields_are_chosen_and_json_is_indented() -> None:
    params = types.AdamParams()
    assert params.model_dump(include={"beta1"}) == {"beta1": 0.9}
    assert "beta1" not in params.model_dump(exclude={"beta1"})
    text = params.model_dump_json(indent=2, include=["eps", "beta1"])
    assert text.splitlines()[1].startswith('  "')
    assert json.loads(text) == {"beta1": 0.9, "eps": 1e-12}


def test_invalid_json_is_a_value_error() -> None:
    for kind in (types.AdamParams, types.ModelInput):
        with pytest.raises(ValueError):
            kind.model_validate_json("{")
    with pytest.raises(ValueError, match="chunks"):
        types.ModelInput.model_validate_json("{}")


def test_a_model_input_goes_through_json() -> None:
    prompt = types.ModelInput.from_ints([1, 2]).append(types.ImageChunk(data=b"x", format="png"))
    assert types.ModelInput.model_validate_json(prompt.model_dump_json(exclude_none=True)) == prompt
    assert types.ModelInput.model_validate(prompt) is prompt


def test_secrets_do_not_show() -> None:
    copied = types.CopyWeightsRequest(source_path="p", weights_access_token="hush")
    assert "hush" not in repr(copied)
    assert "hush" not in repr(types.AuthTokenResponse(jwt="hush"))
    assert copied.model_dump()["weights_access_token"] == "hush"


def test_a_checkpoint_has_pages_on_the_hosted_service() -> None:
    path = "tinker://s:train:0/sampler_weights/a b"
    saved = types.SaveWeightsForSamplerResponse(path=path)
    assert saved.get_console_url().endswith("/checkpoints/s%3Atrain%3A0/sampler_weights%2Fa%20b")
    assert "mode=checkpoint&checkpoint=tinker%3A%2F%2F" in saved.get_playground_url()
    assert types.SaveWeightsResponse(path=path).get_console_url() == saved.get_console_url()
