"""Splitting data: nothing lost, nothing reordered, limits kept."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tinkex import types
from tinkex.clients._chunking import datum_bytes, prompt_bytes, split


def text(length: int) -> types.Datum:
    return types.Datum(types.ModelInput.from_ints([1] * length))


@given(
    lengths=st.lists(st.integers(0, 40), max_size=30),
    max_datums=st.integers(1, 5),
    max_bytes=st.integers(1, 200),
)
def test_pieces_hold_all_data_in_order_within_the_limits(
    lengths: list[int], max_datums: int, max_bytes: int
) -> None:
    data = [text(length) for length in lengths]
    pieces = split(data, max_datums=max_datums, max_bytes=max_bytes)
    assert [datum for piece in pieces for datum in piece.data] == data
    for piece in pieces:
        assert piece.num_bytes == sum(map(datum_bytes, piece.data))
        assert 1 <= len(piece.data) <= max_datums
        assert len(piece.data) == 1 or piece.num_bytes <= max_bytes
    for piece, following in pairwise(pieces):
        full = len(piece.data) == max_datums
        assert full or piece.num_bytes + datum_bytes(following.data[0]) > max_bytes


def test_an_oversized_first_datum_makes_no_empty_piece() -> None:
    data = [text(100), text(1), text(1)]
    assert [len(piece.data) for piece in split(data, max_datums=10, max_bytes=50)] == [1, 2]


def test_nothing_makes_no_piece() -> None:
    assert split([], max_datums=1, max_bytes=1) == []


def test_the_size_of_a_datum_counts_tokens_bytes_numbers_and_indices() -> None:
    sparse = types.TensorData(
        data=[1.0, 2.0],
        dtype="float32",
        shape=[2, 3],
        sparse_crow_indices=[0, 1, 2],
        sparse_col_indices=[0, 2],
    )
    datum = types.Datum(
        types.ModelInput(
            chunks=[
                types.EncodedTextChunk(tokens=[1, 2, 3]),
                types.ImageChunk(data=b"12345", format="png"),
                types.DmelChunk(dmel=b"1234567"),
            ]
        ),
        {"target_tokens": types.TensorData.from_numpy(np.zeros(3, np.int64)), "weights": sparse},
    )
    assert datum_bytes(datum) == 4 * 3 + 5 + 7 + 8 * 3 + (4 * 2 + 8 * 3 + 8 * 2)


def test_the_size_of_a_prompt_counts_tokens_as_text() -> None:
    prompt = types.ModelInput(
        chunks=[
            types.EncodedTextChunk(tokens=[1, 2]),
            types.ImageAssetPointerChunk(location="s3://x", format="png"),
        ]
    )
    assert prompt_bytes(prompt) == 20 + 6
