"""Splits the data of one call into requests of the size that servers accept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkex.types import Datum, DmelChunk, EncodedTextChunk, ImageAssetPointerChunk, ImageChunk

if TYPE_CHECKING:
    from tinkex.types import ModelInput, TensorData

__all__ = ["DataChunk", "datum_bytes", "prompt_bytes", "split"]

BYTES_PER_TRAINED_TOKEN = 4
BYTES_PER_PROMPT_TOKEN = 10
BYTES_PER_INDEX = 8


@dataclass(frozen=True)
class DataChunk:
    """The data of one request, and its approximate size on the wire."""

    data: list[Datum]
    num_bytes: int


def split(data: Sequence[Datum], *, max_datums: int, max_bytes: int) -> list[DataChunk]:
    """The data in order, in as few chunks as the limits allow; a datum over the limit gets a chunk of its own.

    >>> from tinkex.types import ModelInput
    >>> three = [Datum(ModelInput.from_ints([1, 2, 3]))] * 3
    >>> [(len(chunk.data), chunk.num_bytes) for chunk in split(three, max_datums=2, max_bytes=1000)]
    [(2, 24), (1, 12)]
    """
    chunks: list[DataChunk] = []
    chunk: list[Datum] = []
    chunk_bytes = 0
    for datum in data:
        num_bytes = datum_bytes(datum)
        if chunk and (len(chunk) >= max_datums or chunk_bytes + num_bytes > max_bytes):
            chunks.append(DataChunk(chunk, chunk_bytes))
            chunk, chunk_bytes = [], 0
        chunk.append(datum)
        chunk_bytes += num_bytes
    if chunk:
        chunks.append(DataChunk(chunk, chunk_bytes))
    return chunks


def datum_bytes(datum: Datum) -> int:
    """The approximate size of a datum on the wire: its input, and every stored number of its loss inputs.

    >>> from tinkex.types import ModelInput
    >>> datum_bytes(Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]}))
    32
    """
    return _input_bytes(datum.model_input, BYTES_PER_TRAINED_TOKEN) + _tensor_bytes(
        datum.loss_fn_inputs.values()
    )


def prompt_bytes(prompt: ModelInput) -> int:
    """The approximate size of a prompt on the wire, where tokens are written as text.

    >>> from tinkex.types import ModelInput
    >>> prompt_bytes(ModelInput.from_ints([1, 2, 3]))
    30
    """
    return _input_bytes(prompt, BYTES_PER_PROMPT_TOKEN)


def _input_bytes(model_input: ModelInput, bytes_per_token: int) -> int:
    total = 0
    for chunk in model_input.chunks:
        if isinstance(chunk, EncodedTextChunk):
            total += bytes_per_token * len(chunk.tokens)
        elif isinstance(chunk, ImageChunk):
            total += len(chunk.data)
        elif isinstance(chunk, DmelChunk):
            total += len(chunk.dmel)
        elif isinstance(chunk, ImageAssetPointerChunk):
            total += len(chunk.location)
    return total


def _tensor_bytes(tensors: Iterable[TensorData]) -> int:
    return sum(
        tensor.array.nbytes
        + BYTES_PER_INDEX * (len(tensor.sparse_crow_indices or ()) + len(tensor.sparse_col_indices or ()))
        for tensor in tensors
    )
