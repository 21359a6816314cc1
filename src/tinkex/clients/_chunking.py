"""Splitting the data of one call into requests that servers accept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkex.types import Datum, DmelChunk, EncodedTextChunk, ImageAssetPointerChunk, ImageChunk

if TYPE_CHECKING:
    from tinkex.types import ModelInput, TensorData

__all__ = ["Piece", "datum_bytes", "prompt_bytes", "split"]

BYTES_PER_TRAINED_TOKEN = 4
BYTES_PER_PROMPT_TOKEN = 10
BYTES_PER_INDEX = 8


@dataclass(frozen=True)
class Piece:
    """Data that goes out in one request, and about how large it is on the wire."""

    data: list[Datum]
    num_bytes: int


def split(data: Sequence[Datum], *, max_datums: int, max_bytes: int) -> list[Piece]:
    """The data in order, in as few pieces as the limits allow; a datum larger than a piece goes alone.

    >>> from tinkex.types import ModelInput
    >>> three = [Datum(ModelInput.from_ints([1, 2, 3]))] * 3
    >>> [(len(piece.data), piece.num_bytes) for piece in split(three, max_datums=2, max_bytes=1000)]
    [(2, 24), (1, 12)]
    """
    pieces: list[Piece] = []
    piece: list[Datum] = []
    piece_bytes = 0
    for datum in data:
        num_bytes = datum_bytes(datum)
        if piece and (len(piece) >= max_datums or piece_bytes + num_bytes > max_bytes):
            pieces.append(Piece(piece, piece_bytes))
            piece, piece_bytes = [], 0
        piece.append(datum)
        piece_bytes += num_bytes
    if piece:
        pieces.append(Piece(piece, piece_bytes))
    return pieces


def datum_bytes(datum: Datum) -> int:
    """About how large a datum is on the wire: its input, and every stored number of its loss inputs.

    >>> from tinkex.types import ModelInput
    >>> datum_bytes(Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]}))
    32
    """
    return _input_bytes(datum.model_input, BYTES_PER_TRAINED_TOKEN) + _tensor_bytes(
        datum.loss_fn_inputs.values()
    )


def prompt_bytes(prompt: ModelInput) -> int:
    """About how large a prompt is on the wire, where tokens are written as text.

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
