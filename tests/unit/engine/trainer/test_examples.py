"""What a caller can get wrong is rejected, with an error that names the field, before any compute."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tinkex.engine.trainer.examples import Example, Limits, read_examples
from tinkex.engine.trainer.losses import CUSTOM, LOSSES, find_loss, read_settings
from tinkex.errors import InvalidInput
from tinkex.types.inputs import Datum, DmelChunk, EncodedTextChunk, ModelInput
from tinkex.types.tensors import TensorData

LIMITS = Limits(vocab_size=10, max_context=4)


def datum(tokens: Any = (1, 2, 3), **inputs: Any) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints(list(tokens)), loss_fn_inputs={"target_tokens": [2, 3, 4], **inputs}
    )


def policy(**inputs: Any) -> Datum:
    return datum(**{"logprobs": [-1.0] * 3, "advantages": [1.0] * 3, **inputs})


def read(*data: Datum, loss_fn: str = "cross_entropy", config: dict[str, Any] | None = None) -> list[Example]:
    loss = find_loss(loss_fn)
    return read_examples(data, loss, read_settings(loss, config), LIMITS)


def rejection(*data: Datum, loss_fn: str = "cross_entropy", config: dict[str, Any] | None = None) -> str:
    with pytest.raises(InvalidInput) as caught:
        read(*data, loss_fn=loss_fn, config=config)
    return str(caught.value)


def test_missing_weights_are_ones() -> None:
    [example] = read(datum())
    assert example.inputs["weights"].tolist() == [1, 1, 1]
    assert example.shape == (3,)


def test_sparse_targets_and_weights_are_padded_with_zero() -> None:
    targets = np.zeros((3, 8), dtype=np.int64)
    targets[:, 0] = [2, 3, 4]
    weights = np.zeros((3, 8), dtype=np.float32)
    weights[1, 0] = -0.5
    [example] = read(datum(target_tokens=torch.from_numpy(targets), weights=torch.from_numpy(weights)))
    assert example.targets.reshape(3, 8).tolist() == targets.tolist()
    assert example.inputs["weights"].reshape(3, 8).tolist() == weights.tolist()
    assert example.targets_per_position == 8


def sparse(shape: list[int], values: list[float], columns: list[int], dtype: Any = "int64") -> TensorData:
    """A CSR tensor with all its values in the first row."""
    return TensorData(values, dtype, shape, [0, *[len(values)] * shape[0]], columns)


def test_sparse_targets_that_no_memory_holds_are_rejected_by_their_shape() -> None:
    shape = [3, 10**12]
    reported = rejection(datum(target_tokens=sparse(shape, [2], [0])))
    assert "data[0].loss_fn_inputs['target_tokens']" in reported
    assert "(3, 1000000000000)" in reported
    with pytest.raises(InvalidInput, match="several passes"):
        read(*[datum(target_tokens=sparse([3, 2**20], [2], [0])) for _ in range(11)])


def test_sparse_inputs_of_a_custom_loss_are_bounded_too() -> None:
    class Declared:
        input_names = ("teacher",)
        ranks: ClassVar[dict[str, int]] = {"logprobs": 1, "teacher": 2}

    given = datum(teacher=sparse([3, 10**12], [0.5], [0], "float32"))
    with pytest.raises(InvalidInput, match="teacher"):
        read_examples([given], CUSTOM, {}, LIMITS, Declared())


def test_a_cell_that_is_listed_twice_is_rejected() -> None:
    targets = np.ones((3, 4), dtype=np.int64)
    reported = rejection(datum(target_tokens=targets, weights=sparse([3, 4], [1.0, 2.0], [1, 1], "float32")))
    assert "'weights'" in reported
    assert "twice" in reported
    read(datum(target_tokens=targets, weights=sparse([3, 4], [1.0, 2.0], [2, 1], "float32")))


def test_a_whole_number_mask_counts_as_numbers() -> None:
    [example] = read(policy(sequence_ratio_mask=np.array([0, 1, 1])), loss_fn="gspo")
    assert example.inputs["sequence_ratio_mask"].tolist() == [0, 1, 1]


def test_settings_and_per_token_thresholds_reach_every_token() -> None:
    [plain] = read(policy(), loss_fn="ppo", config={"clip_high_threshold": 1.5})
    [own] = read(
        policy(clip_high_threshold=[1.1, 1.2, 1.3]), loss_fn="ppo", config={"clip_high_threshold": 1.5}
    )
    assert plain.inputs["clip_high_threshold"].tolist() == [1.5] * 3
    assert plain.inputs["clip_low_threshold"] == pytest.approx([0.8] * 3)
    assert own.inputs["clip_high_threshold"] == pytest.approx([1.1, 1.2, 1.3])


def test_no_data_is_rejected() -> None:
    assert "data is empty" in rejection()


def test_an_empty_datum_is_rejected_with_its_index() -> None:
    assert "data[1].model_input is empty" in rejection(datum(), datum(tokens=()))


def test_a_missing_input_is_named() -> None:
    bare = Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs={})
    assert "data[0].loss_fn_inputs lacks 'target_tokens'" in rejection(bare)
    assert "lacks 'advantages', which ppo needs" in rejection(datum(logprobs=[0.0] * 3), loss_fn="ppo")
    assert "lacks 'sequence_ratio_mask'" in rejection(policy(), loss_fn="gspo")


def test_an_input_the_loss_does_not_read_is_named() -> None:
    message = rejection(datum(mask=np.ones(3)))
    assert "'mask', which cross_entropy does not read" in message
    assert "target_tokens, weights" in message
    assert "'weights'" in rejection(policy(weights=[1.0] * 3), loss_fn="importance_sampling")


@pytest.mark.parametrize(
    ("wrong", "shapes"),
    [
        ({"target_tokens": [2, 3]}, ("(2,)", "3 tokens")),
        ({"weights": [1.0, 1.0]}, ("(2,)", "(3,)")),
        (
            {"target_tokens": np.ones((3, 2), dtype=np.int64), "weights": np.ones((3, 4))},
            ("(3, 4)", "(3, 2)"),
        ),
        ({"target_tokens": np.ones((3, 2), dtype=np.int64), "weights": np.ones(6)}, ("(6,)", "(3, 2)")),
        ({"target_tokens": np.ones((3, 1, 2), dtype=np.int64)}, ("(3, 1, 2)", "(N,) or (N, K)")),
    ],
)
def test_shapes_that_do_not_fit_are_both_named(wrong: dict[str, Any], shapes: tuple[str, str]) -> None:
    message = rejection(datum(**wrong))
    assert all(shape in message for shape in shapes), message


def test_many_targets_are_rejected_where_the_loss_takes_one() -> None:
    message = rejection(policy(target_tokens=np.ones((3, 2), dtype=np.int64)), loss_fn="ppo")
    assert "ppo takes (N,)" in message


def test_token_ids_outside_the_vocabulary_are_rejected() -> None:
    assert "data[0].model_input has token id 10 at flat position 2" in rejection(datum(tokens=(1, 2, 10)))
    assert "['target_tokens'] has token id -1 at flat position 0" in rejection(
        datum(target_tokens=[-1, 2, 3])
    )
    assert "0…9" in rejection(datum(target_tokens=[1, 2, 11]))


def test_a_datum_longer_than_the_context_is_rejected_with_the_limit() -> None:
    message = rejection(datum(tokens=range(5), target_tokens=[1] * 5))
    assert "5 tokens" in message
    assert "context is 4" in message


def test_targets_of_the_wrong_dtype_are_rejected() -> None:
    targets = TensorData(data=[1.0, 2.0, 3.0], dtype="float32")
    assert "dtype float32; token ids must be int64" in rejection(datum(target_tokens=targets))


def test_chunks_that_are_not_text_are_rejected() -> None:
    chunks = [EncodedTextChunk(tokens=[1]), DmelChunk(dmel=b"\x00\x01\x02")]
    audio = Datum(model_input=ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": [1, 2, 3]})
    assert "chunks[1] is of type 'dmel'" in rejection(audio)


def test_values_that_are_not_finite_are_rejected_with_their_position() -> None:
    message = rejection(datum(weights=[1.0, float("nan"), float("inf")]))
    assert "data[0].loss_fn_inputs['weights'] is not finite at flat position 1" in message


def test_crossed_thresholds_are_rejected() -> None:
    assert "clip_low_threshold 2" in rejection(policy(), loss_fn="ppo", config={"clip_low_threshold": 2.0})
    crossed = policy(clip_low_threshold=[0.8, 0.8, 1.3])
    assert "at position 2" in rejection(crossed, loss_fn="ppo")


def test_an_empty_sequence_mask_with_advantages_is_rejected() -> None:
    assert "marks no token" in rejection(policy(sequence_ratio_mask=[0.0] * 3), loss_fn="gspo")


def test_an_empty_sequence_mask_without_advantages_is_fine() -> None:
    read(policy(sequence_ratio_mask=[0.0] * 3, advantages=[0.0] * 3), loss_fn="gspo")


def test_a_loss_whose_formula_is_not_public_is_rejected_and_named() -> None:
    with pytest.raises(InvalidInput, match="'stable_reinforce' is not supported: its formula is not public"):
        find_loss("stable_reinforce")


def test_an_unknown_loss_lists_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="'nll' does not exist") as caught:
        find_loss("nll")
    assert all(name in str(caught.value) for name in LOSSES)


@pytest.mark.parametrize(
    ("loss_fn", "config", "message"),
    [
        ("cross_entropy", {"beta": 0.1}, "'beta', which cross_entropy does not read; its settings: none"),
        ("ppo", {"epsilon": 0.2}, "clip_low_threshold, clip_high_threshold"),
        ("dro", {"beta": "0.1"}, r"\['beta'\] must be a finite number, and is '0.1'"),
        ("dro", {"beta": float("nan")}, "must be a finite number"),
        ("dro", {"beta": True}, "must be a finite number"),
        ("dro", {"beta": -1.0}, "must be ≥ 0"),
    ],
)
def test_settings_the_loss_cannot_honour_are_rejected(
    loss_fn: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_settings(LOSSES[loss_fn], config)
