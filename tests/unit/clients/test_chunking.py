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
def test_chunks_contain_all_data_in_order_within_the_limits(
    lengths: list[int], max_datums: int, max_bytes: int
) -> None:
    data = [text(length) for length in lengths]
    chunks = split(data, max_datums=max_datums, max_bytes=max_bytes)
    assert [datum for chunk in chunks for datum in chunk.data] == data
    for chunk in chunks:
        assert chunk.num_bytes == sum(map(datum_bytes, chunk.data))
        assert 1 <= len(chunk.data) <= max_datums
        assert len(chunk.data) == 1 or chunk.num_bytes <= max_bytes
    for chunk, following in pairwise(chunks):
        full = len(chunk.data) == max_datums
        assert full or chunk.num_bytes + datum_bytes(following.data[0]) > max_bytes


def test_an_oversized_first_datum_makes_no_empty_chunk() -> None:
    data = [text(100), text(1), text(1)]
    assert [len(chunk.data) for chunk in split(data, max_datums=10, max_bytes=50)] == [1, 2]


def test_no_data_makes_no_chunk() -> None:
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
