from __future__ import annotations

import json

import pytest
from tinker import types as official

from tinkex import types
from tinkex._wire import json as wire
from tinkex.errors import InvalidInput


def test_none_is_left_out_and_defaults_are_kept() -> None:
    body = json.loads(
        wire.encode(
            types.CreateModelRequest(
                session_id="s",
                model_seq_id=0,
                base_model="m",
                lora_config=types.LoraConfig(rank=8),
                optimizer_config={"type": "adamw"},
            )
        )
    )
    theirs = official.CreateModelRequest(
        session_id="s", model_seq_id=0, base_model="m", lora_config=official.LoraConfig(rank=8)
    )
    assert body == theirs.model_dump(mode="json", exclude_none=True)


def test_a_sample_request_is_written_like_the_official_one() -> None:
    target = types.TensorData(data=[1, 2], dtype="int64", shape=[2, 1])
    ours = types.SampleRequest(
        prompt=types.ModelInput.from_ints([1, 2, 3]),
        sampling_params=types.SamplingParams(max_tokens=4, seed=2**64 - 1, stop=["a"]),
        sampling_session_id="s:sample:0",
        seq_id=3,
        prompt_logprobs=True,
        target_prompt_logprobs=target,
        record_stability_info=False,
    )
    theirs = official.SampleRequest(
        prompt=official.ModelInput.from_ints([1, 2, 3]),
        sampling_params=official.SamplingParams(max_tokens=4, seed=2**64 - 1, stop=["a"]),
        sampling_session_id="s:sample:0",
        seq_id=3,
        prompt_logprobs=True,
        num_samples=1,
        record_stability_info=False,
    )
    expected = theirs.model_dump(mode="json", exclude_none=True)
    body = json.loads(wire.encode(ours))
    assert body.pop("target_prompt_logprobs") == {"data": [1, 2], "dtype": "int64", "shape": [2, 1]}
    assert body == expected
    again = wire.decode(wire.encode(ours), types.SampleRequest)
    assert again.prompt.to_ints() == [1, 2, 3]
    assert again.target_prompt_logprobs is not None
    assert again.target_prompt_logprobs.tolist() == [[1], [2]]
    assert again.sampling_params == ours.sampling_params


def test_images_travel_as_base64() -> None:
    chunk = types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=2)
    body = json.loads(wire.encode(types.ModelInput(chunks=[chunk])))
    assert body["chunks"][0]["data"] == "iVBORw=="
    assert wire.decode(wire.encode(types.ModelInput(chunks=[chunk])), types.ModelInput).chunks == [chunk]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", "truncated"),
        (b"[]", "object"),
        (b'{"prompt": {"chunks": []}}', "sampling_params"),
        (b'{"prompt": {"chunks": [{"type": "x"}]}, "sampling_params": {}}', "chunk"),
        (b'{"prompt": {"chunks": []}, "sampling_params": {"top_q": 1}}', "top_q"),
        (b'{"prompt": {"chunks": []}, "sampling_params": {"top_p": 2}}', "top_p"),
        (b'{"prompt": {"chunks": []}, "sampling_params": {}, "num_samples": "many"}', "num_samples"),
    ],
)
def test_malformed_bodies_name_what_is_wrong(body: bytes, field: str) -> None:
    with pytest.raises(wire.Malformed, match=field):
        wire.decode(body, types.SampleRequest)


def test_a_lone_surrogate_is_named_with_its_text() -> None:
    stop = types.SamplingParams(stop=["fine", "not \ud83d fine"])
    with pytest.raises(InvalidInput, match=r"not .* fine.* lone surrogate"):
        wire.encode(stop)
