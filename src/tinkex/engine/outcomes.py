"""Results and errors of operations, in the form they are stored and sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinkex._wire import json as wire_json
from tinkex._wire import proto as wire_proto
from tinkex.engine.store import Outcome, ResultFormat
from tinkex.errors import EngineError, RequestErrorCategory
from tinkex.types import OptimStepResponse, SampleResponse
from tinkex.types.base import Value
from tinkex.types.plain import finite_or_text


def passed(output: bytes) -> Outcome:
    """The result of a pass, which comes encoded from where it was computed."""
    return Outcome.done(output, ResultFormat.PROTO)


def succeeded(value: Value | SampleResponse) -> Outcome:
    """A result: protobuf for samples, JSON for the rest.

    >>> succeeded(OptimStepResponse(metrics={"grad_norm": 0.5})).result
    b'{"metrics":{"grad_norm":0.5}}'
    """
    if isinstance(value, SampleResponse):
        return Outcome.done(wire_proto.encode_sample_response(value), ResultFormat.PROTO)
    if isinstance(value, OptimStepResponse):
        return Outcome.done(wire_json.encode({"metrics": _finite(value.metrics or {})}), ResultFormat.JSON)
    return Outcome.done(wire_json.encode(value), ResultFormat.JSON)


def failed(error: BaseException) -> Outcome:
    """A failure, with the side at fault; an error that is not ours is the server's."""
    category = error.category if isinstance(error, EngineError) else RequestErrorCategory.Server
    text = str(error) or type(error).__name__
    return Outcome.failed(
        text if isinstance(error, EngineError) else f"{type(error).__name__}: {text}", category
    )


def _finite(metrics: Mapping[str, float]) -> dict[str, Any]:
    return {name: finite_or_text(float(value)) for name, value in metrics.items()}
