"""A request as a span of the operation it is sent for."""

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
    row: Endpoint,
    request: Request,
    attempt: int,
    base_url: str,
) -> T:
    """What ``send`` returns for the request with the headers of its trace; those that the user sets stand."""
    begun = operation.start_request(row.method, row.path, attempt, base_url)
    if begun is None:
        return await send(row, request, attempt)
    with begun as span:
        try:
            got = await send(row, replace(request, headers={**span.headers, **request.headers}), attempt)
        except APIStatusError as error:
            span.record_status(error.status_code, failed=True)
            raise
        status = got.status if isinstance(got, Reply) else 200  # a stream is one only if it was let in
        # A held poll that ends without a result (408) is no failure.
        span.record_status(status, failed=status >= 400 and not (status == 408 and row.purpose == "retrieve"))
        return got
