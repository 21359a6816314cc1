"""The part of the REST client that makes calls by their path, for endpoints without a method of their own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack
from urllib.parse import parse_qsl, urlsplit

from tinkex import types
from tinkex._transport.base import Reply
from tinkex._transport.multipart import Form, FormFiles
from tinkex._transport.signed_urls import redirect_target
from tinkex._wire import json
from tinkex._wire.endpoints import endpoint_at
from tinkex.clients._docstrings import documented
from tinkex.clients._twins import async_form
from tinkex.config import values
from tinkex.errors import APIResponseValidationError, APIStatusError
from tinkex.types.display import suggestion

if TYPE_CHECKING:
    from tinkex.clients._rest_calls import RestCalls
    from tinkex.futures import AwaitableConcurrentFuture

__all__ = ["RawMethods"]

Method = Literal["GET", "POST", "PUT", "DELETE"]


class CallOptions(TypedDict, total=False):
    """Options of one call by path."""

    query: Mapping[str, Any] | None
    headers: Mapping[str, str] | None
    timeout: float | None
    """In seconds; default: that of the client."""
    max_retries: int | None
    """Default: that of the client."""


def _known(options: CallOptions) -> CallOptions:
    """Returns the options of a call; raises ``TypeError`` for an unknown one."""
    names = CallOptions.__annotations__
    for name in options:
        if name not in names:
            raise TypeError(
                f"a call by path has no option {name!r}{suggestion(name, names)}; available: {', '.join(names)}"
            )
    return options


@dataclass(frozen=True)
class RawCall:
    """One call by path; invalid arguments raise here, before anything is sent."""

    method: Method
    path: str
    body: Any = None
    files: FormFiles | None = None
    query: Mapping[str, Any] | None = None
    headers: Mapping[str, str] | None = None
    timeout: float | None = None
    max_retries: int | None = None

    def __post_init__(self) -> None:
        parts, path = urlsplit(self.path), self.path
        foreign = parts.scheme or parts.netloc or parts.fragment
        if foreign or not path.startswith("/") or not path.isprintable():
            raise ValueError(f"the path of a call starts with a slash, such as /api/v1/healthz; got {path!r}")
        for name, value in (self.query or {}).items():
            if not isinstance(name, str) or not name or not isinstance(value, str | int | float | None):
                raise ValueError(
                    f"a query has names that are not empty, with strings and numbers; got {name!r}: {value!r}"
                )
        try:
            if self.timeout is not None:
                values.timeout(self.timeout)
            if self.max_retries is not None:
                values.max_retries(self.max_retries)
            values.headers(self.headers or {})
        except ValueError as error:
            raise ValueError(f"{self.method} {path} was not sent: {error}") from error
        if self.files and self.body is not None and not isinstance(self.body, Mapping):
            raise TypeError(f"the body of a form is a mapping of its fields, got {type(self.body).__name__}")


@documented("rest")
class RawMethods:
    """Calls by path, with this client's key, retries, connections, events and spans.

    ``path`` starts with ``/api/v1/``. ``options`` are ``query``, ``headers``, ``timeout`` (seconds) and ``max_retries``; the last
    two default to those of the client. The result is the parsed JSON, None for an empty body, and for a redirect its ``url``,
    ``status`` and ``expires``; an error status is raised as its typed error.
    """

    _calls: RestCalls

    def get(self, path: str, **options: Unpack[CallOptions]) -> AwaitableConcurrentFuture[Any]:
        """Makes a GET request: ``rest.get("/api/v1/healthz").result()``."""
        return self._calls.start(self._json(RawCall("GET", path, **_known(options))))

    get_async = async_form(get)

    def post(
        self,
        path: str,
        body: Any = None,
        *,
        files: FormFiles | None = None,
        **options: Unpack[CallOptions],
    ) -> AwaitableConcurrentFuture[Any]:
        """Makes a POST request; ``body`` is sent as JSON, or with ``files`` as the fields of a form.

        Nested fields are named ``a[b]``, items of lists ``a[]``. ``files`` is what ``upload_assets`` takes, or
        a list of ``(field, (name, content))``. All attempts have the same idempotency key, so that the server can
        recognise a repetition::

            rest.post("/api/v1/weights_info", {"tinker_path": path}).result()["base_model"]
        """
        return self._calls.start(self._json(RawCall("POST", path, body, files, **_known(options))))

    post_async = async_form(post)

    def put(
        self, path: str, body: Any = None, **options: Unpack[CallOptions]
    ) -> AwaitableConcurrentFuture[Any]:
        """Makes a PUT request; ``body`` is sent as JSON."""
        return self._calls.start(self._json(RawCall("PUT", path, body, **_known(options))))

    put_async = async_form(put)

    def delete(self, path: str, **options: Unpack[CallOptions]) -> AwaitableConcurrentFuture[Any]:
        """Makes a DELETE request."""
        return self._calls.start(self._json(RawCall("DELETE", path, **_known(options))))

    delete_async = async_form(delete)

    def request(
        self,
        method: Method,
        path: str,
        body: Any = None,
        *,
        files: FormFiles | None = None,
        **options: Unpack[CallOptions],
    ) -> AwaitableConcurrentFuture[types.RawResponse]:
        """Makes a request and returns the whole response: status, headers and body.

        ``bytes`` as a body are sent as they are; name their type in the header ``content-type``.
        """
        return self._calls.start(self._raw(RawCall(method, path, body, files, **_known(options))))

    request_async = async_form(request)

    async def _json(self, call: RawCall) -> Any:
        response = await self._raw(call)
        if 300 <= response.status < 400:  # such as the signed URL of an archive: not followed with the key
            headers = response.headers
            return {"url": headers["location"], "status": response.status, "expires": headers.get("expires")}
        try:
            return response.json() if response.body else None
        except ValueError as error:
            raise APIResponseValidationError(
                None, response.body, f"the reply to {call.method} {call.path} is not JSON: {error}"
            ) from error

    async def _raw(self, call: RawCall) -> types.RawResponse:
        parts = urlsplit(call.path)
        form = Form(call.body or {}, call.files) if call.files else None
        policy = self._calls.caller.policy
        began = time.monotonic()
        try:
            reply = await self._calls.exchange(
                endpoint_at(call.method, parts.path),
                None if form is not None or call.body is None else _encoded(call.body),
                query={**dict(parse_qsl(parts.query, keep_blank_values=True)), **(call.query or {})},
                headers={name.lower(): value for name, value in (call.headers or {}).items()},
                timeout=call.timeout,
                policy=policy if call.max_retries is None else replace(policy, max_retries=call.max_retries),
                upload=form,
            )
        except APIStatusError as error:
            if redirect_target(error) is None:
                raise
            reply = Reply(error.status_code, error.response.headers, error.response.text.encode())
        return types.RawResponse(
            status=reply.status,
            headers=dict(reply.headers),
            body=reply.body,
            elapsed_s=time.monotonic() - began,
        )


def _encoded(body: Any) -> bytes:
    return bytes(body) if isinstance(body, bytes | bytearray) else json.encode(body, omit_none=False)
