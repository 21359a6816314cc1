"""Signing in: an API key is exchanged for a cookie, which only the dashboard accepts.

The cookie holds a token that this server signs. Every request looks up its key, so that a revoked key ends its sessions.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from tinkex.engine.api.auth import signer_of
from tinkex.engine.engine import Engine
from tinkex.engine.store import KeyRow
from tinkex.errors import NotAllowed, Unauthorized

SESSION_S = 12 * 3600.0
FORM_TOKEN = "x-tinkex-form"  # noqa: S105 -- the name of a header
"""The header of requests that change something; forms have a field of this name."""
_SESSION, _FORM = "dashboard", "dashboard form"
MAX_ENDED = 10_000
"""Sessions that were signed out and have not expired; the oldest is forgotten when there are more."""
_FOREIGN = frozenset({"cross-site", "same-site"})


@dataclass(frozen=True)
class BrowserSession:
    """A browser that signed in: its key, and when that ends."""

    session_id: str
    key: KeyRow
    expires_at: float


class BrowserSessions:
    """The sessions of browsers. Safe on any thread.

    Example:
        >>> sessions = BrowserSessions(engine)
        >>> sessions.read(sessions.start(key, "127.0.0.1:8787", now), "127.0.0.1:8787", now).key.user_id
        'ada'
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._ended: dict[str, float] = {}

    def start(self, key: KeyRow, host: str, now: float) -> str:
        """Returns the token of a new session with a key, for the pages of one host."""
        claims = {"key": key.key_id, "sid": secrets.token_urlsafe(16), "host": host}
        return signer_of(self._engine).issue(_SESSION, claims, now + SESSION_S)

    def read(self, token: str, host: str, now: float) -> BrowserSession:
        """Returns the session of a token; raises :class:`Unauthorized` with what is wrong, and :class:`NotAllowed` for another host."""
        signer = signer_of(self._engine)
        claims = signer.read(_SESSION, token, now)
        if claims is None:
            if signer.read(_SESSION, token, 0.0) is not None:
                raise Unauthorized(
                    f"your sign-in has ended after {SESSION_S / 3600:.0f} hours; sign in again."
                )
            raise Unauthorized("this browser is not signed in; sign in with an API key of this server.")
        with self._lock:
            if claims["sid"] in self._ended:
                raise Unauthorized("you have signed out; sign in again.")
        if claims["host"] != host:
            raise NotAllowed(
                f"the request is for the host {host[:100]!r}, and this browser signed in at {claims['host']!r}; open the dashboard there, "
                "or sign out and sign in again."
            )
        key = self._engine.store.users.key(int(claims["key"]))
        if key is None:
            raise Unauthorized(
                "the API key that you signed in with has been revoked; sign in with another one."
            )
        return BrowserSession(claims["sid"], key, float(claims["exp"]))

    def end(self, session: BrowserSession, now: float) -> None:
        """Sign a browser out."""
        with self._lock:
            self._ended = {sid: until for sid, until in self._ended.items() if until > now}
            if len(self._ended) >= MAX_ENDED:
                self._ended.pop(next(iter(self._ended)))
            self._ended[session.session_id] = session.expires_at

    def form_token(self, session: BrowserSession) -> str:
        """Returns what requests of the session's own pages have, and those of other pages cannot know."""
        return signer_of(self._engine).issue(_FORM, {"sid": session.session_id}, session.expires_at)

    def check_form_token(self, session: BrowserSession, token: str, now: float) -> None:
        """Raises :class:`NotAllowed` for a request that is not of a page of this session."""
        claims = signer_of(self._engine).read(_FORM, token, now)
        if claims is None or claims["sid"] != session.session_id:
            raise NotAllowed(
                f"the request has no valid {FORM_TOKEN}, so it may be from a page of another site; reload the page and try again."
            )


def cookie_name(request: Request) -> str:
    """The name of the cookie; it has the port, because browsers send cookies to every port of a host."""
    port = request.url.port or (443 if request.url.scheme == "https" else 80)
    return f"tinkex-{port}"


def set_cookie(request: Request, response: Response, token: str) -> None:
    """Store a session in the browser, out of reach of scripts and other sites."""
    response.set_cookie(
        cookie_name(request),
        token,
        max_age=int(SESSION_S),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


def clear_cookie(request: Request, response: Response) -> None:
    """Remove the session from the browser."""
    response.delete_cookie(
        cookie_name(request), httponly=True, samesite="strict", secure=request.url.scheme == "https"
    )


def session_of(sessions: BrowserSessions, request: Request) -> BrowserSession:
    """The session of a request; raises :class:`Unauthorized`."""
    return sessions.read(request.cookies.get(cookie_name(request), ""), host_of(request), time.time())


def host_of(request: Request) -> str:
    """The host that a request is for, with its port."""
    return request.headers.get("host", "").lower()


def is_foreign(headers: Mapping[str, str]) -> bool:
    """Whether a browser says that a page of another origin caused a request.

    >>> is_foreign({"sec-fetch-site": "same-origin", "host": "a", "origin": "http://a"})
    False
    >>> is_foreign({"host": "localhost:8787", "origin": "http://localhost:3000"})
    True
    """
    origin, host = headers.get("origin"), headers.get("host", "")
    if origin is not None and origin.lower() not in {f"http://{host}".lower(), f"https://{host}".lower()}:
        return True
    return headers.get("sec-fetch-site", "") in _FOREIGN


def is_navigation(method: str, headers: Mapping[str, str]) -> bool:
    """Whether a browser opens a page in a tab, which a link on any page may do.

    >>> is_navigation("GET", {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"})
    True
    >>> is_navigation("GET", {"sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"})
    False
    """
    return (
        method == "GET"
        and "origin" not in headers
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )


def check_same_origin(method: str, headers: Mapping[str, str]) -> None:
    """Raises :class:`NotAllowed` for a request that a page of another origin causes, unless it only opens a page."""
    if is_foreign(headers) and not is_navigation(method, headers):
        page = headers.get("origin", "another site")[:100]
        raise NotAllowed(
            f"the request is from a web page of {page!r}, and the dashboard accepts only its own; open its address in a tab."
        )
