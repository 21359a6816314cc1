"""Values are counted before they are decoded: never too few, and never far beyond the limit."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tinkex._wire import tinkex_wire_pb2 as pb
from tinkex._wire.counting import CONTAINER_VALUES, DATUM_VALUES, count_json_values, count_proto_values
from tinkex._wire.proto import encode_forward_backward
from tinkex.types import Datum, ForwardBackwardRequest, ModelInput, TensorData

NO_LIMIT = 10**9

JSON_VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=40,
)


def values_in(value: Any) -> int:
    """Numbers and strings, and containers by their weight; keys are free."""
    if isinstance(value, dict):
        return CONTAINER_VALUES + sum(map(values_in, value.values()))
    if isinstance(value, list):
        return CONTAINER_VALUES + sum(map(values_in, value))
    return 1


@given(JSON_VALUES)
def test_json_never_has_more_values_than_are_counted(value: Any) -> None:
    assert (
        count_json_values(json.dumps(value, ensure_ascii=False).encode(), NO_LIMIT) >= values_in(value) * 0.9
    )


@given(st.lists(st.lists(st.integers(0, 1000), max_size=20), max_size=10))
def test_the_tokens_and_datums_of_a_pass_are_counted(sequences: list[list[int]]) -> None:
    data = [Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens}) for tokens in sequences]
    body = encode_forward_backward(ForwardBackwardRequest(model_id="r", seq_id=1, data=data, loss_fn="l"))
    tokens = sum(map(len, sequences))
    messages = 4 * len(sequences)  # chunk, text, entry of the map, tensor
    least = tokens + len(sequences) * DATUM_VALUES + messages * CONTAINER_VALUES
    assert least <= count_proto_values(body, NO_LIMIT) <= least + 4 * messages + 3


def test_dense_tensors_are_one_value_and_sparse_indices_are_many() -> None:
    def counted(tensor: TensorData) -> int:
        datum = Datum(ModelInput.from_ints([1]), {"weights": tensor})
        request = ForwardBackwardRequest(model_id="r", seq_id=1, data=[datum], loss_fn="l")
        return count_proto_values(encode_forward_backward(request), NO_LIMIT)

    dense = TensorData(data=[0.0] * 1000, dtype="float32", shape=[1000])
    sparse = TensorData(
        data=[1.0] * 1000, dtype="float32", shape=[1, 1000],
        sparse_crow_indices=[0, 1000], sparse_col_indices=list(range(1000)),
    )  # fmt: skip
    assert counted(dense) < 300
    assert 1000 < counted(sparse) < 1400


def test_counting_stops_soon_after_the_limit() -> None:
    assert count_proto_values(b"\x1a\x00" * 100_000, 1000) <= 1000 + DATUM_VALUES
    assert count_json_values(b"[{}" + b",{}" * 3_000_000 + b"]", 1000) < 1024 * 1024 * CONTAINER_VALUES


@given(st.binary(max_size=300))
def test_any_bytes_can_be_counted(body: bytes) -> None:
    assert count_proto_values(body, NO_LIMIT) <= DATUM_VALUES * (len(body) + 1)


def test_the_numbers_of_a_shape_are_counted_packed_or_not() -> None:
    packed = pb.Tensor(shape=[1] * 500).SerializeToString()
    single = b"\x20\x01" * 500
    for tensor in (packed, single):
        entry = b"\x0a\x01w\x12" + _sized(tensor)
        datum = b"\x12" + _sized(entry)
        assert count_proto_values(b"\x1a" + _sized(datum), NO_LIMIT) > 500


def _sized(content: bytes) -> bytes:
    length = len(content)
    return bytes([length & 0x7F | 0x80, length >> 7]) + content
