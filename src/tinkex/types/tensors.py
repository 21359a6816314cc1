"""Tensors of requests and responses: numpy arrays, dense or CSR, with two dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

__all__ = ["TensorData", "TensorDtype"]

TensorDtype = Literal["int64", "float32"]

_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {"int64": np.dtype("<i8"), "float32": np.dtype("<f4")}


class TensorData:
    """A typed array of the protocol.

    Stored values, ``data`` of type ``dtype``, are flat, with an optional ``shape``. With ``sparse_crow_indices`` and ``sparse_col_indices`` the
    values are those of a CSR matrix; cells that are not listed get the pad value that the reader passes.

    >>> t = TensorData(data=[1, 2, 3, 4], dtype="int64", shape=[2, 2])
    >>> t.tolist()
    [[1, 2], [3, 4]]
    """

    __slots__ = ("_array", "dtype", "shape", "sparse_col_indices", "sparse_crow_indices")

    dtype: TensorDtype
    shape: list[int] | None
    sparse_crow_indices: list[int] | None
    sparse_col_indices: list[int] | None
    _array: npt.NDArray[Any]

    def __init__(
        self,
        data: Sequence[int] | Sequence[float] | npt.NDArray[Any] | None = None,
        dtype: TensorDtype | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | None = None,
        sparse_col_indices: Sequence[int] | None = None,
    ) -> None:
        if dtype is None or dtype not in _NUMPY_DTYPES:
            raise ValueError(f"TensorData needs dtype 'int64' or 'float32', got {dtype!r}")
        given = _numbers(data if data is not None else [], dtype)
        array = given.reshape(-1)
        dims = [int(n) for n in shape] if shape is not None else None
        if dims is None and given.ndim > 1:
            dims = list(given.shape)  # the shape of nested data
        if dims is not None and any(n < 0 for n in dims):
            raise ValueError(f"TensorData shape {dims} has a negative dimension")
        if (sparse_crow_indices is None) != (sparse_col_indices is None):
            raise ValueError(
                "a CSR TensorData needs both sparse_crow_indices and sparse_col_indices; only one was given"
            )
        if sparse_crow_indices is not None and sparse_col_indices is not None:
            _check_csr(array, dims, sparse_crow_indices, sparse_col_indices)
        elif dims is not None and math.prod(dims) != array.size:
            raise ValueError(
                f"TensorData has {array.size} values but shape {dims} needs "
                f"{math.prod(dims)}; pass a matching shape or none"
            )
        put = object.__setattr__
        put(self, "dtype", dtype)
        put(self, "_array", array)
        put(self, "shape", dims)
        put(self, "sparse_crow_indices", _ints(sparse_crow_indices))
        put(self, "sparse_col_indices", _ints(sparse_col_indices))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"TensorData is frozen; create a new one instead of setting {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorData, (
            self._array,
            self.dtype,
            self.shape,
            self.sparse_crow_indices,
            self.sparse_col_indices,
        )

    def __repr__(self) -> str:
        kind = "csr, " if self.is_sparse else ""
        return f"TensorData({kind}dtype={self.dtype!r}, shape={self.shape}, {self._array.size} values)"

    @property
    def array(self) -> npt.NDArray[Any]:
        """The stored values, flat, without a copy."""
        return self._array

    @property
    def is_sparse(self) -> bool:
        """Whether this is a CSR matrix."""
        return self.sparse_crow_indices is not None

    @property
    def data(self) -> list[int] | list[float]:
        """The stored values as a flat list."""
        values: list[int] | list[float] = self._array.tolist()
        return values

    @classmethod
    def from_numpy(cls, array: npt.NDArray[Any]) -> TensorData:
        """Wraps the numpy array ``array``; floats become float32, signed integers int64, others are rejected.

        >>> import numpy as np
        >>> TensorData.from_numpy(np.zeros((2, 3))).shape
        [2, 3]
        """
        kind = array.dtype.kind
        if kind == "f":
            dtype: TensorDtype = "float32"
        elif kind == "i":
            dtype = "int64"
        else:
            raise ValueError(
                f"cannot send a numpy array of dtype {array.dtype}; convert it to float32 or int64 first"
            )
        return cls(data=np.ascontiguousarray(array).reshape(-1), dtype=dtype, shape=list(array.shape))

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorData:
        """Wraps the torch tensor ``tensor`` (detached, on the CPU); bfloat16 and half become float32.

        >>> import torch
        >>> TensorData.from_torch(torch.ones(3, dtype=torch.bfloat16)).dtype
        'float32'
        """
        import torch as _torch

        dense = tensor.detach().cpu()
        if dense.is_floating_point():
            dense = dense.to(_torch.float32)
        elif dense.dtype == _torch.bool:
            raise ValueError("cannot send a bool tensor; convert it to float32 or int64 first")
        else:
            dense = dense.to(_torch.int64)
        return cls.from_numpy(dense.numpy())

    @classmethod
    def from_torch_sparse(cls, tensor: torch.Tensor, pad_value: float = 0) -> TensorData:
        """Wraps the 2-D ``tensor`` as CSR of the cells that differ from ``pad_value``; dense if that is smaller.

        >>> import torch
        >>> TensorData.from_torch_sparse(torch.eye(8)).data
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
        """
        dense = cls.from_torch(tensor).to_numpy()
        if dense.ndim != 2:
            return cls.from_numpy(dense)
        rows, cols = dense.shape
        listed = dense != pad_value
        nnz = int(listed.sum())
        if rows + 1 + 2 * nnz >= rows * cols:
            return cls.from_numpy(dense)
        crow = np.concatenate([[0], np.cumsum(listed.sum(axis=1))])
        return cls(
            data=dense[listed],
            dtype="int64" if dense.dtype.kind == "i" else "float32",
            shape=[rows, cols],
            sparse_crow_indices=crow.tolist(),
            sparse_col_indices=np.nonzero(listed)[1].tolist(),
        )

    def to_numpy(self, pad_value: float = 0) -> npt.NDArray[Any]:
        """Returns the tensor as a dense numpy array of its shape; unlisted CSR cells get ``pad_value``.

        >>> TensorData(data=[1, 2], dtype="int64").to_numpy()
        array([1, 2])
        """
        if not self.is_sparse:
            return self._array if self.shape is None else self._array.reshape(self.shape)
        assert self.shape is not None
        assert self.sparse_crow_indices is not None
        dense = np.full(self.shape, pad_value, dtype=self._array.dtype)
        crow = np.asarray(self.sparse_crow_indices, dtype=np.int64)
        counts = crow[1:] - crow[:-1]
        rows = np.repeat(np.arange(self.shape[0]), counts)
        dense[rows, np.asarray(self.sparse_col_indices, dtype=np.int64)] = self._array
        return dense

    def to_torch(self, pad_value: float = 0) -> torch.Tensor:
        """Returns the tensor as a dense torch tensor (a copy); unlisted CSR cells get ``pad_value``.

        >>> TensorData(data=[1, 2], dtype="int64").to_torch()
        tensor([1, 2])
        """
        import torch as _torch

        return _torch.from_numpy(self.to_numpy(pad_value).copy())

    def tolist(self, pad_value: float = 0) -> Any:
        """Returns the tensor as nested lists of its shape; unlisted CSR cells get ``pad_value``.

        >>> TensorData(data=[1, 2, 3, 4], dtype="int64", shape=[2, 2]).tolist()
        [[1, 2], [3, 4]]
        """
        return self.to_numpy(pad_value).tolist()


def _numbers(
    data: Sequence[int] | Sequence[float] | npt.NDArray[Any], dtype: TensorDtype
) -> npt.NDArray[Any]:
    try:
        array = np.asarray(data)
    except ValueError as error:
        raise ValueError(
            f"TensorData takes a rectangular numeric array, and ragged nested lists are not ({error})"
        ) from error
    if array.size and array.dtype.kind not in "iufb":
        raise ValueError(f"TensorData takes numbers, got values of type {array.dtype}")
    if dtype == "int64" and array.dtype.kind == "f":
        if array.size and not bool(np.all(array == np.floor(array))):
            raise ValueError("TensorData of dtype int64 got fractional values; use dtype='float32'")
        if array.size and float(np.abs(array).max()) >= 2.0**63:
            raise ValueError("TensorData of dtype int64 got a value beyond 2**63-1")
    elif array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError("TensorData of dtype int64 got a value above 2**63-1")
    return np.ascontiguousarray(array, dtype=_NUMPY_DTYPES[dtype])


def _ints(values: Sequence[int] | None) -> list[int] | None:
    return None if values is None else [int(v) for v in values]


def _check_csr(
    array: npt.NDArray[Any], shape: list[int] | None, crow: Sequence[int], col: Sequence[int]
) -> None:
    if shape is None or len(shape) != 2:
        raise ValueError(f"a CSR TensorData needs a shape of two dimensions, got {shape}")
    rows, cols = shape
    crow_array = np.asarray(crow, dtype=np.int64)
    col_array = np.asarray(col, dtype=np.int64)
    if len(crow_array) != rows + 1:
        raise ValueError(f"sparse_crow_indices has {len(crow_array)} entries; {rows} rows need {rows + 1}")
    if len(col_array) != array.size:
        raise ValueError(f"sparse_col_indices has {len(col_array)} entries for {array.size} values")
    if crow_array[0] != 0 or crow_array[-1] != array.size or bool(np.any(np.diff(crow_array) < 0)):
        raise ValueError("sparse_crow_indices must increase from 0 to the number of values")
    if array.size and (int(col_array.min()) < 0 or int(col_array.max()) >= cols):
        raise ValueError(f"sparse_col_indices must be in 0…{cols - 1}")
