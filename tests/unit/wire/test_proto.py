"""The protobuf codec against the official package: what either writes, the other reads the same."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st
from tinker import types as official
from tinker.proto import tinker_public_pb2 as official_pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from tinkex import types
from tinkex._wire import proto
from tinkex._wire.json import Malformed

tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12)
floats = st.floats(-1e6, 1e6, width=32)
ids = st.text("abc-:0123", min_size=1, max_size=8)


@st.composite
def requests(draw: st.DrawFn) -> types.ForwardBackwardRequest:
    data = []
    for _ in range(draw(st.integers(0, 3))):
        chunks: list[types.ModelInputChunk] = [
            types.EncodedTextChunk(tokens=t) for t in draw(st.lists(tokens, min_size=1, max_size=3))
        ]
        if draw(st.booleans()):
            chunks.append(
                types.ImageChunk(data=draw(st.binary(max_size=8)), format="jpeg", expected_tokens=3)
            )
        n = sum(chunk.length for chunk in chunks)
        weights = draw(st.lists(floats, min_size=n, max_size=n))
        inputs = {
            "target_tokens": types.TensorData(data=list(range(n)), dtype="int64", shape=[n]),
            "weights": types.TensorData(data=weights, dtype="float32"),
        }
        if draw(st.booleans()):
            inputs["sparse"] = types.TensorData(
                data=[1.0],
                dtype="float32",
                shape=[2, 3],
                sparse_crow_indices=[0, 0, 1],
                sparse_col_indices=[2],
            )
        spans = None
        if draw(st.booleans()):
            spans = [
                types.PromptProvenanceSpan(sequence_id="a", length=n),
                types.SampledProvenanceSpan(sequence_id="b", offset=3, length=1),
            ]
        data.append(types.Datum(types.ModelInput(chunks=chunks), inputs, spans, spans))
    config = draw(st.none() | st.dictionaries(ids, floats | ids, max_size=3))
    return types.ForwardBackwardRequest(
        draw(ids), draw(st.integers(1, 2**31 - 1)), data, "ppo", config or None, draw(st.booleans())
    )


def to_official(request: types.ForwardBackwardRequest) -> official.ForwardBackwardRequest:
    data = []
    for datum in request.data:
        chunks = []
        for c in datum.model_input.chunks:
            if isinstance(c, types.EncodedTextChunk):
                chunks.append(official.EncodedTextChunk(tokens=c.tokens))
            else:
                assert isinstance(c, types.ImageChunk)
                chunks.append(
                    official.ImageChunk(data=c.data, format=c.format, expected_tokens=c.expected_tokens)
                )
        inputs = {
            k: tinker.TensorData(t.array, t.dtype, t.shape, t.sparse_crow_indices, t.sparse_col_indices)
            for k, t in datum.loss_fn_inputs.items()
        }
        spans = None
        if datum.model_input_spans:
            spans = [
                getattr(official, type(s).__name__)(
                    sequence_id=s.sequence_id, offset=s.offset, length=s.length
                )
                for s in datum.model_input_spans
            ]
        data.append(official.Datum(official.ModelInput(chunks=chunks), inputs, spans, spans))
    body = official.ForwardBackwardInput(data=data, loss_fn="ppo", loss_fn_config=request.loss_fn_config)
    import inspect

    fields = inspect.signature(official.ForwardBackwardRequest).parameters
    extra = {"forward_only": request.forward_only} if "forward_only" in fields else {}
    return official.ForwardBackwardRequest(
        forward_backward_input=body, model_id=request.model_id, seq_id=request.seq_id, **extra
    )


def assert_same(a: types.ForwardBackwardRequest, b: types.ForwardBackwardRequest) -> None:
    assert (a.model_id, a.seq_id, a.loss_fn, a.loss_fn_config) == (
        b.model_id,
        b.seq_id,
        b.loss_fn,
        b.loss_fn_config,
    )
    assert len(a.data) == len(b.data)
    for x, y in zip(a.data, b.data, strict=True):
        assert x.model_input == y.model_input
        assert x.model_input_spans == y.model_input_spans
        assert x.loss_fn_inputs.keys() == y.loss_fn_inputs.keys()
        for key, tensor in x.loss_fn_inputs.items():
            other = y.loss_fn_inputs[key]
            assert (tensor.dtype, tensor.data, tensor.is_sparse) == (other.dtype, other.data, other.is_sparse)
            assert tensor.tolist() == other.tolist()


@pytest.mark.slow
@given(requests())
def test_a_request_round_trips(request: types.ForwardBackwardRequest) -> None:
    again = proto.decode_forward_backward(proto.encode_forward_backward(request))
    assert_same(request, again)
    assert again.forward_only == request.forward_only


@pytest.mark.slow
@given(requests())
def test_we_read_what_the_official_client_writes(request: types.ForwardBackwardRequest) -> None:
    assert_same(
        request,
        proto.decode_forward_backward(
            forward_backward_request_to_proto(to_official(request)).SerializeToString()
        ),
    )


@pytest.mark.slow
@given(requests())
def test_the_official_schema_reads_what_we_write(request: types.ForwardBackwardRequest) -> None:
    theirs = official_pb.ForwardBackwardRequest.FromString(proto.encode_forward_backward(request))
    expected = forward_backward_request_to_proto(to_official(request))
    expected.forward_only = request.forward_only
    assert theirs == expected


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), max_size=5),
    st.dictionaries(ids, floats, max_size=3),
)
def test_the_official_client_reads_our_training_results(shapes: list, metrics: dict) -> None:
    outputs = []
    for n, k in shapes:
        shape = (n, k) if k else (n,)
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        outputs.append({"logprobs": types.TensorData.from_numpy(values)})
    output = types.ForwardBackwardOutput("CrossEntropyLossReturn", outputs, metrics)
    encoded = proto.encode_forward_backward_output(output)
    theirs = deserialize_forward_backward_output(encoded)
    ours = proto.decode_forward_backward_output(encoded)
    assert theirs.metrics == ours.metrics == metrics
    assert len(theirs.loss_fn_outputs) == len(ours.loss_fn_outputs) == len(outputs)
    for expected, a, b in zip(outputs, theirs.loss_fn_outputs, ours.loss_fn_outputs, strict=True):
        assert a["logprobs"].tolist() == b["logprobs"].tolist() == expected["logprobs"].tolist()


def test_the_official_client_reads_our_samples() -> None:
    table = types.TopkLogprobs(
        np.array([[4, 5], [0, 0]], np.int32), np.array([[-0.1, -0.2], [-99999.0, -99999.0]], np.float32)
    )
    response = types.SampleResponse(
        sequences=[
            types.SampledSequence(
                "stop", "x", np.array([1, 2], np.int32), np.array([-0.5, -0.6], np.float32), table
            ),
            types.SampledSequence("length", "y", np.array([3], np.int32)),
        ],
        prompt_logprobs_np=np.array([np.nan, -1.0], np.float32),
        topk_prompt_logprobs_np=table,
        target_prompt_logprobs=types.TensorData(data=[-1.0, -2.0], dtype="float32", shape=[1, 2]),
        prompt_cache_hit_tokens=7,
        prompt_alt_tokens=types.PromptAltTokens(
            types.TensorData(data=[1, 2], dtype="int64", shape=[1, 2]),
            types.TensorData(data=[-1.0, -2.0], dtype="float32", shape=[1, 2]),
        ),
    )
    encoded = proto.encode_sample_response(response)
    theirs = deserialize_sample_response(encoded)
    ours = proto.decode_sample_response(encoded, ["x", "y"])
    for read in (theirs, ours):
        assert [s.tokens for s in read.sequences] == [[1, 2], [3]]
        assert [s.stop_reason for s in read.sequences] == ["stop", "length"]
        assert read.sequences[0].logprobs == pytest.approx([-0.5, -0.6])
        assert read.sequences[1].logprobs is None
        assert read.prompt_logprobs == [None, -1.0]
        assert read.prompt_cache_hit_tokens == 7
        assert read.target_prompt_logprobs is not None
        assert read.target_prompt_logprobs.tolist() == [[-1.0, -2.0]]
    assert ours.topk_prompt_logprobs == theirs.topk_prompt_logprobs
    assert ours.sequences[0].topk_logprobs == theirs.sequences[0].topk_logprobs
    assert [s.sequence_id for s in ours.sequences] == ["x", "y"]
    with pytest.raises(Malformed, match="2 sequences but announced 1"):
        proto.decode_sample_response(encoded, ["x"])


def test_a_setting_of_an_unknown_kind_is_malformed_and_not_zero() -> None:
    message = official_pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="dro")
    message.loss_fn_config["beta"] = 0.5
    message.loss_fn_config_v2["beta"].SetInParent()
    with pytest.raises(Malformed, match="beta"):
        proto.decode_forward_backward(message.SerializeToString())


@pytest.mark.parametrize(
    "reader",
    [
        proto.decode_forward_backward,
        proto.decode_forward_backward_output,
        lambda b: proto.decode_sample_response(b, []),
    ],
)
def test_bytes_that_are_not_a_message_are_malformed(reader) -> None:
    with pytest.raises(Malformed):
        reader(b"\xff\xff\xff\xff")


@given(st.binary(max_size=200))
def test_random_bytes_never_escape_the_codec(data: bytes) -> None:
    for reader in (
        proto.decode_forward_backward,
        proto.decode_forward_backward_output,
        lambda b: proto.decode_sample_response(b, []),
    ):
        with contextlib.suppress(Malformed):
            reader(data)


@pytest.mark.slow
@given(requests(), st.data())
def test_errors_of_corrupt_messages_never_escape_the_codec(
    request: types.ForwardBackwardRequest, data: st.DataObject
) -> None:
    encoded = bytearray(proto.encode_forward_backward(request))
    if encoded:
        at = data.draw(st.integers(0, len(encoded) - 1))
        encoded[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(Malformed):
        proto.decode_forward_backward(bytes(encoded))
