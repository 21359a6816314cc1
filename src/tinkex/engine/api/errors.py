"""Domain errors as HTTP responses."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from starlette.responses import Response

from tinkex._wire import json as wire_json
from tinkex.engine.api.dialects import NATIVE, Dialect
from tinkex.errors import (
    Busy,
    Conflict,
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
    # Clients retry 5xx responses for minutes; a permanent rejection must be a 4xx.
    Unsupported: 400,
}


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None, *, omit_none: bool = True
) -> Response:
    """Returns a JSON response with a Content-Length; without one clients take a 400 for a broken proxy."""
    content = wire_json.encode(value, omit_none=omit_none)
    return Response(content, status_code=status, headers=headers, media_type=JSON)


def detail_response(
    detail: str, status: int, dialect: Dialect = NATIVE, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns the response for a failure that is not one of our errors."""
    body = dialect.error_body(status, {"detail": detail}, None)
    return json_response(body, status, headers, omit_none=False)


def error_response(error: TinkexError, dialect: Dialect = NATIVE) -> Response:
    """Returns the response for an error, in the form of the client's protocol.

    >>> from tinkex.errors import InvalidInput
    >>> response = error_response(InvalidInput("seq_id 0 does not exist"))
    >>> response.status_code, response.body
    (400, b'{"detail":"seq_id 0 does not exist"}')
    """
    if not isinstance(error, EngineError):
        error = EngineFailure(str(error))
    content: dict[str, object] = {"detail": str(error)}
    if isinstance(error, Busy):
        # Over quota: the user waits for their own operations. Otherwise the server is at capacity.
        state = "paused_rate_limit" if isinstance(error, OverQuota) else "paused_capacity"
        content |= {"queue_state": state, "queue_state_reason": str(error)}
    status = status_of(error)
    response = json_response(dialect.error_body(status, content, error), status, omit_none=False)
    if isinstance(error, Busy | ModelUnavailable | StorageUnavailable):
        response.headers["retry-after"] = str(_retry_after_s(error))
    if isinstance(error, Conflict):
        response.headers["x-should-retry"] = "false"  # clients retry other responses with this status
    return response


def status_of(error: EngineError) -> int:
    """Returns the HTTP status of an error."""
    return STATUSES.get(type(error), error.status)


def _retry_after_s(error: EngineError) -> int:
    if isinstance(error, Busy) and error.retry_after_s is not None:
        return math.ceil(error.retry_after_s)
    return 5 if isinstance(error, OverQuota) else 1


def failure_response(error: Exception, dialect: Dialect = NATIVE) -> Response:
    """Returns the response for an unexpected exception, which is logged."""
    logger.error("a request failed unexpectedly", exc_info=error)
    return detail_response(
        f"internal server error: {type(error).__name__}; see the server's log.", 500, dialect
    )
