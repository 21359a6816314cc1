"""Tensors and data of both packages hold, fold and pad the same numbers."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
import tinker
import torch
from hypothesis import given, settings

import tinkex

ARRAYS = st.one_of(
    hnp.arrays(np.int64, hnp.array_shapes(max_dims=3, max_side=4), elements=st.integers(-5, 2**40)),
    hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=4), elements=st.floats(-10, 10, width=32)),
)
QUICK = settings(max_examples=40, deadline=None, database=None)


def same(build: Any) -> None:
    theirs, ours = build(tinker.TensorData), build(tinkex.TensorData)
    assert (ours.dtype, ours.data) == (theirs.dtype, theirs.data)
    assert ours.sparse_crow_indices == theirs.sparse_crow_indices
    assert ours.sparse_col_indices == theirs.sparse_col_indices
    for pad in (0, -1):
        np.testing.assert_array_equal(ours.to_numpy(pad), theirs.to_numpy(pad))
        assert ours.to_numpy(pad).dtype == theirs.to_numpy(pad).dtype
        assert ours.tolist(pad) == theirs.tolist(pad)
        assert torch.equal(ours.to_torch(pad), theirs.to_torch(pad))


@QUICK
@given(ARRAYS)
def test_dense_tensors(array: npt.NDArray[Any]) -> None:
    dtype = "int64" if array.dtype == np.int64 else "float32"
    same(lambda kind: kind.from_numpy(array))
    same(lambda kind: kind.from_torch(torch.from_numpy(array)))
    same(lambda kind: kind(data=array.reshape(-1).tolist(), dtype=dtype, shape=list(array.shape)))
    same(lambda kind: kind(data=array.reshape(-1).tolist(), dtype=dtype))
    same(lambda kind: kind(data=array, dtype=dtype))
    same(lambda kind: kind(data=array.tolist(), dtype=dtype))


@QUICK
@given(hnp.arrays(np.int64, (6, 5), elements=st.sampled_from([0, 0, 0, 0, 7, -1])), st.sampled_from([0, -1]))
def test_sparse_tensors(array: npt.NDArray[Any], pad: int) -> None:
    same(lambda kind: kind.from_torch_sparse(torch.from_numpy(array), pad_value=pad))
    same(lambda kind: kind.from_torch_sparse(torch.from_numpy(array).to(torch.float32)))


def test_half_precision_is_widened_and_bools_are_rejected() -> None:
    same(lambda kind: kind.from_torch(torch.tensor([1.5, 2.25], dtype=torch.bfloat16)))
    same(lambda kind: kind.from_torch(torch.tensor([1, 2], dtype=torch.int32)))
    for package in (tinker, tinkex):
        for wrong in (np.array([True]), np.array([1], dtype=np.uint8)):
            with pytest.raises(ValueError):
                package.TensorData.from_numpy(wrong)
        with pytest.raises(ValueError):
            package.TensorData(data=[1, 2, 3], dtype="int64", shape=[2, 2])


@pytest.mark.parametrize(
    "inputs",
    [
        {"target_tokens": [1, 2, 3], "weights": [0.0, 1.0, 1]},
        {"target_tokens": [[1, 2], [3, 4]], "weights": [[0.5, 0.5], [1, 0]]},
        {"target_tokens": torch.zeros(8, 8, dtype=torch.int64), "weights": torch.eye(8)},
        {"target_tokens": np.arange(3), "advantages": torch.tensor([1.0, 2, 3])},
        {"logprobs": [0.5, 1.5], "sequence_ratio_mask": [1, 0]},
    ],
)
def test_a_datum_takes_lists_arrays_and_tensors(inputs: dict[str, Any]) -> None:
    theirs = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
    ours = tinkex.Datum(model_input=tinkex.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
    assert ours.loss_fn_inputs.keys() == theirs.loss_fn_inputs.keys()
    for key, tensor in theirs.loss_fn_inputs.items():
        mine = ours.loss_fn_inputs[key]
        assert (mine.dtype, mine.data, mine.tolist()) == (tensor.dtype, tensor.data, tensor.tolist())
        assert mine.sparse_crow_indices == tensor.sparse_crow_indices


@pytest.mark.parametrize(
    ("inputs", "error"),
    [({"unheard_of": [1, 2]}, KeyError), ({"weights": [[1.0], [1.0, 2.0]]}, ValueError)],
)
def test_a_datum_rejects_the_same_lists(inputs: dict[str, Any], error: type[Exception]) -> None:
    for package in (tinker, tinkex):
        with pytest.raises(error):
            package.Datum(model_input=package.ModelInput.from_ints([1]), loss_fn_inputs=inputs)
