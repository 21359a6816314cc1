"""One attempt of a request as a span of the operation it belongs to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from tinkex._transport.base import Reply, Request
from tinkex.errors import APIStatusError

if TYPE_CHECKING:
    from tinkex._wire.endpoints import Endpoint
    from tinkex.observability.tracing import OperationSpan

__all__ = ["traced"]

T = TypeVar("T")


async def traced(
    operation: OperationSpan,
    send: Callable[[Endpoint, Request, int], Awaitable[T]],
    endpoint: Endpoint,
    request: Request,
    attempt: int,
    base_url: str,
) -> T:
    """What ``send`` returns for the request with its trace headers; headers that the user set take precedence."""
    started = operation.start_request(endpoint.method, endpoint.path, attempt, base_url)
    if started is None:
        return await send(endpoint, request, attempt)
    with started as span:
        try:
            result = await send(
                endpoint, replace(request, headers={**span.headers, **request.headers}), attempt
            )
        except APIStatusError as error:
            span.record_status(error.status_code, failed=True)
            raise
        status = result.status if isinstance(result, Reply) else 200  # an error status of a stream is raised
        # A long poll that ends without a result (408) is not a failure.
        is_poll_timeout = status == 408 and endpoint.purpose == "retrieve"
        span.record_status(status, failed=status >= 400 and not is_poll_timeout)
        return result
