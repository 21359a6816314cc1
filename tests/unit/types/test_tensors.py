from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tinkex.types import TensorData


@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=5), elements=st.floats(-9, 9, width=32)))
def test_a_float_array_comes_back_unchanged(array: np.ndarray) -> None:
    tensor = TensorData.from_numpy(array)
    assert tensor.dtype == "float32"
    np.testing.assert_array_equal(tensor.to_numpy(), array)


@given(
    hnp.arrays(np.int64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=st.integers(-3, 3))
)
def test_a_sparse_tensor_reads_like_the_official_one(array: np.ndarray) -> None:
    ours = TensorData.from_torch_sparse(torch.from_numpy(array))
    theirs = tinker.TensorData.from_torch_sparse(torch.from_numpy(array))
    assert ours.is_sparse == (theirs.sparse_crow_indices is not None)
    assert ours.data == theirs.data
    np.testing.assert_array_equal(ours.to_numpy(), array)


def test_unlisted_cells_take_the_pad_value() -> None:
    tensor = TensorData(
        data=[5], dtype="int64", shape=[2, 2], sparse_crow_indices=[0, 1, 1], sparse_col_indices=[1]
    )
    assert tensor.tolist(pad_value=-1) == [[-1, 5], [-1, -1]]


@pytest.mark.parametrize("kind", [np.uint8, np.bool_, np.complex64])
def test_arrays_of_other_kinds_are_rejected(kind: type) -> None:
    with pytest.raises(ValueError, match="convert it to float32 or int64"):
        TensorData.from_numpy(np.zeros(2, dtype=kind))


def test_torch_half_types_become_float32() -> None:
    assert TensorData.from_torch(torch.ones(2, dtype=torch.bfloat16)).dtype == "float32"
    assert TensorData.from_torch(torch.ones(2, dtype=torch.int32)).to_torch().dtype == torch.int64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": [1]}, "needs dtype"),
        ({"data": [1], "dtype": "float64"}, "float64"),
        ({"data": [1, 2], "dtype": "int64", "shape": [3]}, "has 2 values but shape"),
        ({"data": [1.5], "dtype": "int64"}, "fractional"),
        ({"data": [2**63, 1], "dtype": "int64"}, "beyond"),
        ({"data": [float("inf")], "dtype": "int64"}, "beyond"),
        ({"data": ["a"], "dtype": "int64"}, "takes numbers"),
        ({"data": [1], "dtype": "int64", "shape": [1, 1], "sparse_crow_indices": [0, 1]}, "both"),
        (
            {
                "data": [1],
                "dtype": "int64",
                "shape": [1, 1],
                "sparse_crow_indices": [0, 1],
                "sparse_col_indices": [4],
            },
            "must be in",
        ),
    ],
)
def test_a_wrong_tensor_says_what_is_wrong(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorData(**arguments)


def test_a_tensor_is_frozen_and_can_be_copied() -> None:
    tensor = TensorData(data=[1.0, 2.0], dtype="float32")
    with pytest.raises(AttributeError, match="frozen"):
        tensor.dtype = "int64"  # type: ignore[misc]
    for twin in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert twin.data == [1.0, 2.0]
