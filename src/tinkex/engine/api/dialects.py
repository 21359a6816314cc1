"""The protocols that the server implements, each with its own form of an error.

The Tinker API is under ``/api/v1``. The routes of other protocols are translators in front of its sample operation; their
errors carry the same messages in the form that clients of that protocol read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tinkex._wire.endpoints import Endpoint
from tinkex.engine.api.field_errors import InvalidField, explain_field_error
from tinkex.errors import TinkexError, UnknownObject

ErrorBody: TypeAlias = Callable[[int, Mapping[str, object], TinkexError | None], Mapping[str, object]]
"""Makes the body of an error of its status, its native body (``detail``, ``queue_state``…) and the error itself."""


@dataclass(frozen=True)
class Dialect:
    """One protocol: its name, how its errors look, and whether a key may be sent as a bearer token."""

    name: str
    error_body: ErrorBody
    accepts_bearer: bool = False
    has: str = "the Tinker API is under /api/v1"
    """What the server has of the protocol, for errors about paths that it does not have."""


def _native(status: int, content: Mapping[str, object], error: TinkexError | None) -> Mapping[str, object]:
    del status, error
    return content


_OPENAI_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def _openai(status: int, content: Mapping[str, object], error: TinkexError | None) -> Mapping[str, object]:
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = "invalid_api_key" if status == 401 else None
    param = (error.field or None) if isinstance(error, InvalidField) else None
    if isinstance(error, UnknownObject):  # the only objects that these routes look up
        code, param = "model_not_found", "model"
    return {"error": {"message": content["detail"], "type": kind, "param": param, "code": code}}


_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def _anthropic(status: int, content: Mapping[str, object], error: TinkexError | None) -> Mapping[str, object]:
    del error
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": content["detail"]}}


NATIVE = Dialect("tinker", _native)
OPENAI = Dialect(
    "openai",
    _openai,
    accepts_bearer=True,
    has="of the OpenAI API it has GET models, POST completions and POST chat/completions, under /v1",
)
ANTHROPIC = Dialect(
    "anthropic",
    _anthropic,
    accepts_bearer=True,
    has="of the Anthropic API it has POST messages and POST messages/count_tokens, under /v1",
)

_PREFIXES: tuple[tuple[str, Dialect], ...] = (
    ("/anthropic/", ANTHROPIC),
    ("/v1/messages/", ANTHROPIC),
    ("/oai/", OPENAI),
    ("/v1/", OPENAI),
)


def dialect_of(path: str) -> Dialect:
    """The dialect of a URL path, whether or not there is a route.

    >>> dialect_of("/v1/completions").name, dialect_of("/api/v1/asample").name
    ('openai', 'tinker')
    """
    return next((dialect for prefix, dialect in _PREFIXES if f"{path}/".startswith(prefix)), NATIVE)


@dataclass(frozen=True)
class Route(Endpoint):
    """A call of another protocol, served at each of ``paths``; its body is decoded strictly."""

    paths: tuple[str, ...] = ()
    unsupported: Mapping[str, str] | None = None
    """Fields of the protocol that are not supported, each with what to do instead."""

    def explain(self, error: Exception) -> InvalidField:
        """The error of a body that does not have the form of the request, naming the field."""
        return explain_field_error(str(error), self.unsupported or {}, self.request)
