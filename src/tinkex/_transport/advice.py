"""What to do about an error status, in one sentence."""

from __future__ import annotations

__all__ = ["advice"]

_ADVICE = {
    400: "Correct what it names; nothing was carried out.",
    401: "Check the API key: api_key=…, or TINKER_API_KEY.",
    402: "Settle the account's billing, then make the call again.",
    403: "This key may not do that; use one that may.",
    404: "Check the id or path: it may have expired, or belong to another server or key.",
    408: "The server took too long; make the call again.",
    409: "Something of that name or number exists; choose another.",
    410: "It is gone from the server; make it again.",
    413: "Send less at once.",
    422: "Correct the values it names; nothing was carried out.",
    429: "The server has enough to do; send fewer requests at once, or wait.",
    501: "This server does not offer it; use another call or another server.",
}


def advice(status: int) -> str:
    """The next step after this status; nothing for statuses that say nothing.

    >>> advice(401)
    'Check the API key: api_key=…, or TINKER_API_KEY.'
    """
    if status in _ADVICE:
        return _ADVICE[status]
    return (
        "The server failed, also when asked again; try later, or look into its log." if status >= 500 else ""
    )
