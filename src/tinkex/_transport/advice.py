"""The next step after an error status, in one sentence."""

from __future__ import annotations

__all__ = ["advice"]

_ADVICE = {
    400: "Correct what it names; nothing was executed.",
    401: "Check the API key: api_key=…, or TINKER_API_KEY.",
    402: "Settle the account's billing, then make the call again.",
    403: "This key is not allowed to do that; use one that is.",
    404: "Check the id or path: it may have expired, or belong to another server or key.",
    408: "The server took too long; make the call again.",
    409: "The object is in a state that does not allow this.",
    410: "It was deleted from the server; create it again.",
    413: "Send less in one request.",
    422: "Correct the values it names; nothing was executed.",
    429: "The server is at capacity; send fewer requests simultaneously, or wait.",
    501: "This server does not support it; use another call or another server.",
}

_EXPIRED = frozenset({400, 401, 403, 404, 410})
"""Statuses of signed URLs that are no longer valid."""


def advice(status: int, *, signed_url: bool = False) -> str:
    """What to do after this status; empty for statuses that suggest nothing.

    >>> advice(401)
    'Check the API key: api_key=…, or TINKER_API_KEY.'
    >>> advice(403, signed_url=True)
    'The signed URL may have expired; request a new one.'
    """
    if signed_url and status in _EXPIRED:
        return "The signed URL may have expired; request a new one."
    if status in _ADVICE:
        return _ADVICE[status]
    return "The server failed; try later, or see its log." if status >= 500 else ""
