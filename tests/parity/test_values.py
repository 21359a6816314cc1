"""What programs read off prompts, samples and paths is the same in both packages."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import tinker

import tinkex

BOTH = (tinker, tinkex)


def response(package: Any) -> Any:
    topk = importlib.import_module(f"{package.__name__}.types.topk_logprobs").TopkLogprobs(
        token_ids=np.array([[0, 0], [5, 6], [7, 0]], np.int32),
        logprobs=np.array([[-99999.0, -99999.0], [-0.5, -1.5], [-0.25, -99999.0]], np.float32),
    )
    sequence = package.SampledSequence(
        stop_reason="stop",
        sequence_id="q1",
        tokens_np=np.array([4, 5, 6], np.int32),
        logprobs_np=np.array([-0.5, -1.0, -2.0], np.float32),
        topk_logprobs_np=topk,
    )
    bare = package.SampledSequence(stop_reason="length", sequence_id="q2", tokens_np=np.zeros(0, np.int32))
    return package.SampleResponse(
        sequences=[sequence, bare],
        prompt_logprobs_np=np.array([np.nan, -0.5, -0.75], np.float32),
        topk_prompt_logprobs_np=topk,
        prompt_cache_hit_tokens=2,
    )


def test_the_lists_of_a_sample_are_the_same() -> None:
    theirs, ours = map(response, BOTH)
    for name in ("prompt_logprobs", "topk_prompt_logprobs", "prompt_cache_hit_tokens", "prompt_alt_tokens"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for mine, other in zip(ours.sequences, theirs.sequences, strict=True):
        for name in ("tokens", "logprobs", "topk_logprobs", "stop_reason", "sequence_id"):
            assert getattr(mine, name) == getattr(other, name), name


@pytest.mark.parametrize(
    "path",
    [
        "tinker://run/weights/0001",
        "tinker://s:train:0/sampler_weights/a-b",
        "tinker://r/external_weights/x",
        "tinker://run/other/1",
        "tinker://run/weights",
        "tinker://run/weights/a/b",
        "run/weights/1",
        "",
    ],
)
def test_paths_are_taken_apart_alike(path: str) -> None:
    def parsed(package: Any) -> Any:
        try:
            return package.ParsedCheckpointTinkerPath.from_tinker_path(path).model_dump()
        except ValueError:
            return "rejected"

    assert parsed(tinkex) == parsed(tinker)


def test_prompts_grow_and_count_alike() -> None:
    def read(package: Any) -> list[Any]:
        types = package.types
        prompt = package.ModelInput.empty().append(package.EncodedTextChunk(tokens=[1, 2])).append_int(3)
        image = types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=7)
        pointer = types.ImageAssetPointerChunk(location="s3://x", format="jpeg", expected_tokens=9)
        mixed = prompt.append(image).append(pointer)
        dmel = package.DmelChunk(dmel=bytes([1, 2, 5, 3]) + bytes(15))
        return [
            prompt.to_ints(),
            prompt.length,
            mixed.length,
            dmel.length,
            [type(chunk).__name__ for chunk in mixed.chunks],
            mixed.model_dump(mode="json", exclude_none=True),
            prompt == package.ModelInput.model_validate(prompt.model_dump()),
        ]

    assert read(tinkex) == read(tinker)
    for package in BOTH:
        unknown = package.types.ImageChunk(data=b"", format="png")
        with pytest.raises(ValueError):
            _ = unknown.length
        with pytest.raises(ValueError):
            package.ModelInput(chunks=[unknown]).to_ints()
        with pytest.raises((ValueError, AttributeError)):  # pydantic's error is a ValueError
            package.ModelInput.empty().chunks = []


def test_provenance_spans_tile_alike() -> None:
    def read(package: Any) -> Any:
        datum = package.Datum(
            model_input=package.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]},
        )
        spans = [
            package.PromptProvenanceSpan(sequence_id="q", length=1),
            package.SampledProvenanceSpan(sequence_id="q", offset=0, length=2),
        ]
        reported = datum.with_provenance(spans, spans)
        with pytest.raises(ValueError):
            datum.with_provenance(spans[:1], spans)
        with pytest.raises(ValueError):
            package.PromptProvenanceSpan(sequence_id="", length=1)
        return [(s.sequence_id, s.offset, s.length) for s in reported.model_input_spans]

    assert read(tinkex) == read(tinker)


def test_values_keep_what_they_were_built_from_when_the_caller_continues_with_its_lists() -> None:
    def read(package: Any) -> Any:
        tokens, more, chunks, stop = [1, 2, 3], [4, 5], [package.EncodedTextChunk(tokens=[6])], ["a"]
        inputs: dict[str, Any] = {"weights": [1.0]}
        chunk = package.EncodedTextChunk(tokens=tokens)
        short = package.ModelInput.from_ints(more)
        built = package.ModelInput(chunks=chunks)
        params = package.SamplingParams(stop=stop)
        datum = package.Datum(model_input=short, loss_fn_inputs=inputs)
        for given in (tokens, more, chunks, stop, inputs):
            given.clear()
        return (
            list(chunk.tokens),
            short.to_ints(),
            built.to_ints(),
            params.stop,
            datum.loss_fn_inputs["weights"].tolist(),
        )

    assert read(tinkex) == read(tinker)
    assert read(tinkex)[0] == [1, 2, 3]
