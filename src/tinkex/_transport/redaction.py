"""Keeps secrets of requests out of logs and errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tinkex._transport.base import Reply, Request
from tinkex.config import mask

__all__ = ["redacted_headers", "without_secrets"]

MIN_SECRET_CHARS = 8
"""Shorter texts are not masked where a reply quotes them: they occur inside other words."""

_SAFE_HEADERS = (
    "accept",
    "content-",
    "traceparent",
    "user-agent",
    "x-idempotency-key",
    "x-sdk-",
    "x-stainless-",
    "x-tinker-create-promise",
    "x-tinker-request-",
    "x-tinker-sampling-",
)
"""Prefixes of headers that never hold a secret."""


def redacted_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers as logs show them: without the values of those that may hold a secret.

    >>> redacted_headers({"accept": "application/json", "x-api-key": "tml-secret"})
    {'accept': 'application/json', 'x-api-key': '…'}
    """
    return {name: value if name.lower().startswith(_SAFE_HEADERS) else "…" for name, value in headers.items()}


def without_secrets(reply: Reply, request: Request, secret_query: Mapping[str, str]) -> Reply:
    """An error reply with the secrets of its request masked: some servers and proxies quote what they reject.

    The target of a redirect stays as it is, so that it can be followed.
    """
    body, headers = reply.body, dict(reply.headers)
    location = headers.pop("location", None)
    for value in _secrets(request, secret_query):
        for secret in {value, value.rpartition(" ")[2]}:  # also the key of "Bearer key"
            if len(secret) >= MIN_SECRET_CHARS:
                body = body.replace(secret.encode(), mask(secret).encode())
                headers = {name: text.replace(secret, mask(secret)) for name, text in headers.items()}
    if location is not None:
        headers["location"] = location
    return replace(reply, body=body, headers=headers)


def _secrets(request: Request, secret_query: Mapping[str, str]) -> list[str]:
    secrets = [value for name, value in request.headers.items() if not name.startswith(_SAFE_HEADERS)]
    secrets += secret_query.values()
    if request.shown_path is not None:
        path, _, query = request.path.partition("?")
        secrets += path.split("/")[:-1]
        secrets += [item.partition("=")[2] for item in query.split("&")]
    return secrets
