"""Domain errors as HTTP answers: the one place that knows both."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from starlette.responses import Response

from tinkex._wire import json as wire_json
from tinkex.errors import (
    Busy,
    EngineError,
    EngineFailure,
    ModelUnavailable,
    OverQuota,
    StorageUnavailable,
    TinkexError,
    Unsupported,
)

logger = logging.getLogger("tinkex.engine")

JSON = "application/json"

STATUSES: Mapping[type[EngineError], int] = {
    # Clients repeat calls that answer 5xx for minutes; a refusal that will not change must be a 4xx.
    Unsupported: 400,
}


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer; it always has a Content-Length, without which clients take a 400 for a broken proxy."""
    return Response(wire_json.encode(value), status_code=status, headers=headers, media_type=JSON)


def error_response(error: TinkexError) -> Response:
    """The answer to a call that was refused or failed.

    >>> from tinkex.errors import InvalidInput
    >>> answer = error_response(InvalidInput("seq_id 0 does not exist"))
    >>> answer.status_code, answer.body
    (400, b'{"detail":"seq_id 0 does not exist"}')
    """
    if not isinstance(error, EngineError):
        error = EngineFailure(str(error))
    content: dict[str, object] = {"detail": str(error)}
    if isinstance(error, Busy):
        # A user at the end of their share waits for themselves; otherwise everybody waits for the server.
        state = "paused_rate_limit" if isinstance(error, OverQuota) else "paused_capacity"
        content |= {"queue_state": state, "queue_state_reason": str(error)}
    response = json_response(content, STATUSES.get(type(error), error.status))
    if isinstance(error, Busy | ModelUnavailable | StorageUnavailable):
        response.headers["retry-after"] = str(_retry_after_s(error))
    return response


def _retry_after_s(error: EngineError) -> int:
    if isinstance(error, Busy) and error.retry_after_s is not None:
        return math.ceil(error.retry_after_s)
    return 5 if isinstance(error, OverQuota) else 1


def failure_response(error: Exception) -> Response:
    """The answer to a call that found a bug; the details go to the log."""
    logger.error("a call failed in a way it should not", exc_info=error)
    return json_response({"detail": f"the server failed: {type(error).__name__}; its log says more."}, 500)
