"""Results: long polls that return as soon as a result is available."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.responses import Response

from tinkex._wire import proto as wire_proto
from tinkex._wire import tinkex_wire_pb2 as pb
from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.api.decoding import is_proto
from tinkex.engine.api.errors import JSON, json_response
from tinkex.engine.api.replies import MAX_SMALL_BYTES
from tinkex.engine.lookup import find_sampler, sequence_ids
from tinkex.engine.operation import Kind
from tinkex.engine.store import FutureStatus, Outcome, ResultFormat
from tinkex.errors import Expired, RequestErrorCategory
from tinkex.types import (
    ForwardBackwardOutput,
    FutureFailed,
    FutureFinished,
    FuturesRetrieveResponse,
    RequestFailedResponse,
    TensorData,
    TryAgainResponse,
)
from tinkex.types.plain import finite_or_text
from tinkex.types.sampling import sample_response_as_json

STILL_RUNNING = 408
MAX_LOOP_BYTES = 16 * 1024
"""The size of a result that is converted to JSON on the event loop, in a few milliseconds."""
LARGE_RESULT = 1024 * 1024
"""Larger results are answered with their size only, if the client sets ``allow_metadata_only``."""


async def retrieve_future(call: Call) -> Reply:
    """Returns the result of an operation, or 408 if the poll times out."""
    engine, request_id = call.engine, call.request.request_id
    outcome = await engine.wait(call.owner, request_id, engine.config.long_poll_s)
    if outcome is None:
        queue = engine.queue_state(request_id)
        try_again = TryAgainResponse(
            request_id=request_id, queue_state=queue.state, queue_state_reason=queue.reason
        )
        return json_response(try_again, STILL_RUNNING)
    match outcome.status:
        case FutureStatus.DONE:
            if call.request.allow_metadata_only and len(outcome.result) > LARGE_RESULT:
                metadata = {"status": "complete_metadata", "response_payload_size": len(outcome.result)}
                return json_response(metadata)
            return await _result(call, outcome)
        case FutureStatus.FAILED:
            return RequestFailedResponse(
                error=outcome.error, category=RequestErrorCategory.parse(outcome.category)
            )
        case _:
            raise Expired(f"the result of request {request_id} has expired; submit it again.")


async def retrieve_futures(call: Call) -> Reply:
    """Returns the samples of one sampler client that have ended since the cursor; a long poll until there is one."""
    engine, request = call.engine, call.request
    sampler = find_sampler(engine.store, call.owner, request.target.sampling_session_id)
    if request.retrieved_request_ids:
        engine.store.futures.drop(call.owner, request.retrieved_request_ids)
    timeout_s = engine.config.long_poll_s
    if request.timeout is not None:
        timeout_s = min(max(request.timeout, 0.0), timeout_s)
    ended = await engine.wait_any(
        sampler.sampler_id, request.target.cloned_sampler_id, request.prev_cursor, timeout_s
    )
    return FuturesRetrieveResponse(
        completions=[
            FutureFinished(request_id=row.request_id, response_payload_uncompressed_size=row.num_bytes)
            if row.succeeded
            else FutureFailed(request_id=row.request_id)
            for row in ended
        ],
        cursor=ended[-1].number if ended else request.prev_cursor,
    )


async def cancel_future(call: Call) -> Reply:
    """Cancel a sample."""
    call.engine.cancel(call.owner, call.request.request_id)
    return None


async def _result(call: Call, outcome: Outcome) -> Response:
    num_bytes = len(outcome.result)
    if call.reply is not None and num_bytes > MAX_SMALL_BYTES:
        call.reply.add(num_bytes)  # before anything is awaited: as many results may wait as there are polls
    if outcome.format is ResultFormat.JSON:
        return Response(outcome.result, media_type=JSON)
    if is_proto(call.headers.get("accept", "")):
        return Response(outcome.result, media_type=wire_proto.CONTENT_TYPE)
    if num_bytes <= MAX_LOOP_BYTES:
        return json_response(_as_json(call, outcome.result))
    return await call.run_on_thread(lambda: json_response(_as_json(call, outcome.result)))


def _as_json(call: Call, result: bytes) -> dict[str, Any]:
    """Converts a protobuf result for clients without protobuf."""
    future = call.engine.store.futures.get(call.request.request_id)
    if future is not None and future.kind == Kind.SAMPLE:
        message = pb.SampleResponse.FromString(result)
        ids = sequence_ids(future.request_id, len(message.sequences))
        return sample_response_as_json(wire_proto.decode_sample_response(result, ids))
    return _output_as_json(wire_proto.decode_forward_backward_output(result))


def _output_as_json(output: ForwardBackwardOutput) -> dict[str, Any]:
    return {
        "loss_fn_output_type": output.loss_fn_output_type,
        "loss_fn_outputs": [
            {name: _tensor_as_json(tensor) for name, tensor in record.items()}
            for record in output.loss_fn_outputs
        ],
        "metrics": {name: finite_or_text(value) for name, value in output.metrics.items()},
    }


def _tensor_as_json(tensor: TensorData) -> dict[str, Any]:
    values: list[Any] = tensor.array.tolist()
    if not np.isfinite(tensor.array).all():
        values = [finite_or_text(value) for value in values]
    return {"data": values, "dtype": tensor.dtype, "shape": tensor.shape}


HANDLERS: Mapping[str, Handler] = {
    "retrieve_future": retrieve_future,
    "retrieve_futures": retrieve_futures,
    "cancel_future": cancel_future,
}
