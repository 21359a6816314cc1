"""Requests from web pages: what a server without keys accepts, and CORS for the origins that the operator allows.

A browser sends requests of any web page to any address, also to a server on the user's own machine. With keys that is
harmless: pages do not have the key, and the API takes no cookies; the dashboard, which has one, rejects requests of all other
origins itself. Without keys, the server accepts only requests that
no foreign page can make: their Host is a loopback address, which excludes DNS rebinding; their Origin, if they have one,
is this server or an allowed origin; and a body has a content type for which browsers ask before they send it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkex._wire import proto as wire_proto
from tinkex._wire.endpoints import ENDPOINTS
from tinkex.engine.api.compatible.fields import IGNORED_FIELDS
from tinkex.engine.api.dialects import dialect_of
from tinkex.engine.api.errors import JSON, error_response
from tinkex.engine.api.request_metrics import REQUEST_ID
from tinkex.engine.config import EngineConfig
from tinkex.errors import EngineError, InvalidInput, NotAllowed

PREFLIGHT_MAX_AGE_S = 600
FROM_OTHER_SITES = frozenset({"cross-site", "same-site"})
"""Values of Sec-Fetch-Site for pages of other origins; another port of the same host is another origin."""
MULTIPART_PATHS = frozenset(
    endpoint.path for endpoint in ENDPOINTS.values() if endpoint.request_wire == "multipart"
)
SIGNED_UPLOADS = ENDPOINTS["upload_file"].path.partition("{")[0]
_CHECKED = frozenset(
    {b"host", b"origin", b"sec-fetch-site", b"content-type", b"content-length", b"transfer-encoding"}
)
_LOOPBACK = re.compile(r"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?", re.IGNORECASE)
_HINT = "or start the server without --no-auth and send a key"


class WrongContentType(InvalidInput):
    """A body has a content type that this server does not accept without keys."""

    status = 415


def restrict_origins(app: ASGIApp, config: EngineConfig) -> ASGIApp:
    """Returns the application with CORS for the allowed origins and, without keys, closed to other web pages.

    Example:
        >>> app = restrict_origins(app, EngineConfig(auth=False, allow_origins=("http://localhost:3000",)))
    """
    if config.allow_origins:
        # No credentials: the key is a header. The cookie of the dashboard is for its own pages only.
        app = CORSMiddleware(
            app,
            allow_origins=config.allow_origins,
            allow_methods=sorted({endpoint.method for endpoint in ENDPOINTS.values()}),
            allow_headers=("*",),  # those that the page names
            expose_headers=("retry-after", REQUEST_ID, IGNORED_FIELDS),
            max_age=PREFLIGHT_MAX_AGE_S,
        )
    return app if config.auth else NoForeignPages(app, config.allow_origins)


class NoForeignPages:
    """Rejects what a web page of another origin may have sent; requests of this process have no Host and pass."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str] = ()) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or reject it with 403 or 415."""
        if scope["type"] == "http" and scope["client"] is not None:
            try:
                self.check(scope["method"], scope["path"], scope["headers"])
            except EngineError as error:
                response = error_response(error, dialect_of(scope["path"]))
                response.headers["connection"] = "close"  # the body is not read
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def check(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises :class:`NotAllowed` for a foreign host or origin, and :class:`WrongContentType`.

        >>> check = NoForeignPages(app=None).check
        >>> check("GET", "/api/v1/healthz", [(b"host", b"127.0.0.1:8787")])
        >>> check("GET", "/api/v1/healthz", [(b"host", b"rebound.example")])
        Traceback (most recent call last):
          ...
        tinkex.errors.NotAllowed: the request is for the host 'rebound.example', and a server without keys ...
        """
        given: dict[str, list[str]] = {}
        for name, value in headers:
            if name in _CHECKED:
                given.setdefault(name.decode("ascii"), []).append(value.decode("latin-1"))
        host = _check_host(given.get("host", []))
        self._check_origin(host, given.get("origin", []), given.get("sec-fetch-site", []))
        # The content of a file has any type; its URL is signed.
        if (
            method not in {"GET", "HEAD", "OPTIONS"}
            and _has_body(given)
            and not path.startswith(SIGNED_UPLOADS)
        ):
            _check_content_type(path, given.get("content-type", []))

    def _check_origin(self, host: str, origins: list[str], sites: list[str]) -> None:
        foreign = [o for o in origins if o not in self._allowed and not _is_same_origin(o, host)]
        if foreign:
            raise NotAllowed(
                f"the request is from a web page of {foreign[0][:100]!r}, and a server without keys rejects those; allow the "
                f"page's origin with --allow-origin, {_HINT}."
            )
        if FROM_OTHER_SITES.intersection(sites) and not self._allowed.intersection(origins):
            raise NotAllowed(
                f"the request is from a web page of another site (Sec-Fetch-Site: {sites[0][:100]}), and a server without "
                f"keys rejects those; open the address directly, {_HINT}."
            )


def _check_host(hosts: list[str]) -> str:
    if len(hosts) == 1 and _LOOPBACK.fullmatch(hosts[0]):
        return hosts[0]
    raise NotAllowed(
        f"the request is for the host {', '.join(hosts)[:100]!r}, and a server without keys answers only to localhost, 127.0.0.1 "
        f"and [::1]; use one of them in the URL, {_HINT}."
    )


def _is_same_origin(origin: str, host: str) -> bool:
    return origin.lower() in {f"http://{host}".lower(), f"https://{host}".lower()}


def _has_body(given: dict[str, list[str]]) -> bool:
    return "transfer-encoding" in given or given.get("content-length", ["0"]) != ["0"]


def _check_content_type(path: str, content_types: list[str]) -> None:
    accepted = ("multipart/form-data",) if path in MULTIPART_PATHS else (JSON, wire_proto.CONTENT_TYPE)
    found = [each.partition(";")[0].strip().lower() for each in content_types]
    if len(found) != 1 or found[0] not in accepted:
        raise WrongContentType(
            f"the body has the content type {', '.join(content_types)[:100]!r}, and a server without keys accepts only "
            f"{' and '.join(accepted)} here; set Content-Type."
        )
