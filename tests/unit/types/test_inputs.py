from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from tinkex.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    SampledProvenanceSpan,
    TensorData,
)


def test_text_can_be_built_grown_and_read() -> None:
    prompt = ModelInput.from_ints(np.array([1, 2])).append(EncodedTextChunk(tokens=(3,))).append_int(4)
    assert prompt.to_ints() == [1, 2, 3, 4]
    assert prompt.length == 4
    assert ModelInput.empty().length == 0
    assert prompt.to_numpy().dtype == np.int32


def test_chunks_may_be_given_as_dictionaries() -> None:
    assert ModelInput(chunks=[{"type": "encoded_text", "tokens": [1]}]) == ModelInput.from_ints([1])
    with pytest.raises(ValueError, match="unknown chunk type 'video'"):
        ModelInput(chunks=[{"type": "video"}])


@pytest.mark.parametrize(
    "tokens", [[1.5], ["a"], [True], [[1]], [-1], [2**31], [1e300], [2.0, -1e19], [float("inf")]]
)
def test_tokens_that_are_not_token_ids_are_rejected(tokens: list) -> None:
    with pytest.raises(ValueError, match="token"):
        ModelInput.from_ints(tokens)


def test_an_image_has_a_length_only_when_given() -> None:
    image = ImageChunk(data=b"\x89PNG", format="png")
    with pytest.raises(ValueError, match="expected_tokens"):
        _ = image.length
    assert ImageChunk(data="iVBORw==", format="png", expected_tokens=7).length == 7
    with pytest.raises(ValueError, match="text only"):
        ModelInput(chunks=[image]).to_ints()
    with pytest.raises(ValueError, match="'png' or 'jpeg'"):
        ImageChunk(data=b"", format="gif")  # type: ignore[arg-type]


def test_audio_length_is_its_first_dimension() -> None:
    assert DmelChunk(dmel=bytes([1, 2, 0x85, 0x01, 80])).length == 133
    with pytest.raises(ValueError, match="header"):
        _ = DmelChunk(dmel=b"\x01").length


def test_a_datum_takes_lists_arrays_and_tensors() -> None:
    datum = Datum(
        model_input=ModelInput.from_ints([1, 2]),
        loss_fn_inputs={
            "target_tokens": [2, 3],
            "weights": np.ones(2),
            "advantages": torch.ones(2),
            "logprobs": TensorData(data=[0.0, 0.0], dtype="float32"),
        },
    )
    assert {k: t.dtype for k, t in datum.loss_fn_inputs.items()} == {
        "target_tokens": "int64",
        "weights": "float32",
        "advantages": "float32",
        "logprobs": "float32",
    }


def test_nested_lists_keep_their_shape_and_ragged_ones_are_rejected() -> None:
    inputs = ModelInput.from_ints([1, 2])
    assert Datum(inputs, {"target_tokens": [[1, 2], [3, 4]]}).loss_fn_inputs["target_tokens"].shape == [2, 2]
    for ragged in ([[1, 2], [3]], [[1], []], [1, [2]], [[[1]], [[2], [3]]]):
        with pytest.raises(ValueError, match=r"rectangular numeric array.*ragged nested lists"):
            Datum(inputs, {"target_tokens": ragged})
        with pytest.raises(ValueError, match=r"rectangular numeric array.*ragged nested lists"):
            TensorData(data=ragged, dtype="int64")
    with pytest.raises(KeyError, match="mood"):
        Datum(inputs, {"mood": [1.0]})
    with pytest.raises(TypeError, match="str"):
        Datum(inputs, {"weights": "heavy"})
    with pytest.raises(TypeError, match="loss_fn_inputs are strings, got 1"):
        Datum(inputs, {1: [1.0]})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="from_ints"):
        Datum([1, 2])  # type: ignore[arg-type]


def test_provenance_must_cover_both_sides() -> None:
    datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
    span = SampledProvenanceSpan(sequence_id="s", length=2)
    assert datum.with_provenance(model_input=[span], loss_fn_inputs=[span]).model_input_spans == [span]
    short = SampledProvenanceSpan(sequence_id="s", length=1)
    with pytest.raises(ValueError, match="cover 1 tokens of 2"):
        datum.with_provenance(model_input=[span], loss_fn_inputs=[short])
    with pytest.raises(ValueError, match="together"):
        Datum(datum.model_input, {}, [span])


def test_values_survive_pickle_and_deepcopy() -> None:
    datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
    for twin in (pickle.loads(pickle.dumps(datum)), copy.deepcopy(datum)):
        assert twin.model_input == datum.model_input
        assert twin.loss_fn_inputs["target_tokens"].data == [2, 3]
