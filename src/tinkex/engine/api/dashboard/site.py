"""The site that pages belong to: what they read, who looks at them, and how their requests are answered."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar
from urllib.parse import quote, urlencode

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tinkex._version import __version__
from tinkex._wire.endpoints import Endpoint
from tinkex.engine.api.audit import FailedLogins
from tinkex.engine.api.auth import Authenticated
from tinkex.engine.api.dashboard.rendering import SECURITY_HEADERS, data, encode, render
from tinkex.engine.api.dashboard.sign_in import (
    FORM_TOKEN,
    BrowserSession,
    BrowserSessions,
    check_same_origin,
    cookie_name,
    is_foreign,
    session_of,
)
from tinkex.engine.api.errors import error_response, status_of
from tinkex.engine.api.event_stream import KEEP_ALIVE, EventStream
from tinkex.engine.api.request_metrics import REQUEST_ID, RequestMetrics, request_id_of
from tinkex.engine.engine import Engine
from tinkex.engine.store import LOCAL_USER, MetricReader, Reader, RolloutReader, RunChanges
from tinkex.engine.store.listings import ListedRun, Listings
from tinkex.errors import (
    EngineError,
    EngineFailure,
    ModelUnavailable,
    SetupError,
    StorageUnavailable,
    TinkexError,
    Unauthorized,
    UnknownObject,
)

if TYPE_CHECKING:
    from tinkex.engine.model.tokenizer import EngineTokenizer

T = TypeVar("T")
logger = logging.getLogger("tinkex.engine")

KEEP_ALIVE_S = 15.0
"""Interval of comments in an event stream that has nothing to send."""
METRICS_NAME = "dashboard"
"""What requests of pages are counted as."""


@dataclass(frozen=True)
class Viewer:
    """Who looks at a page. The operator, and everyone on a server without keys, sees what all users have."""

    user: str
    session: BrowserSession | None = None

    @property
    def sees_all(self) -> bool:
        """Whether the pages show what all users have."""
        return self.user == LOCAL_USER

    @property
    def owner(self) -> str | None:
        """Whose objects the pages show; None for those of all users."""
        return None if self.sees_all else self.user


@dataclass
class Dashboard:
    """The pages of one data directory, with the engine that holds it or, read-only, without."""

    reader: Reader
    engine: Engine | None = None
    failed_logins: FailedLogins = field(default_factory=FailedLogins)
    request_metrics: RequestMetrics = field(default_factory=RequestMetrics)
    changes: RunChanges | None = None
    models_home: Path | None = None
    """Without an engine: where the embedded engine stores models."""

    def __post_init__(self) -> None:
        self._tokenizers: dict[str, EngineTokenizer] = {}
        self.listings = Listings(self.reader)
        self.metrics = MetricReader(self.reader)
        self.rollouts = RolloutReader(self.reader)
        self.sessions = BrowserSessions(self.engine) if self.engine is not None else None

    @property
    def has_keys(self) -> bool:
        """Whether a viewer signs in."""
        return self.engine is not None and self.engine.config.auth

    def viewer(self, request: Request) -> Viewer:
        """Who sent a request; raises :class:`Unauthorized` if nobody is signed in."""
        if not self.has_keys:
            return Viewer(LOCAL_USER)
        assert self.sessions is not None
        session = session_of(self.sessions, request)
        return Viewer(session.key.user_id, session)

    def identify(self, request: Request, headers: Mapping[str, str], _endpoint: Endpoint) -> Authenticated:
        """Who sent a request to a route of the API that the dashboard uses; raises what is wrong with it."""
        check_same_origin(request.method, headers)
        viewer = self.viewer(request)
        if viewer.session is None:
            return Authenticated(viewer.user)
        if request.method != "GET":
            self.check_form_token(viewer.session, headers.get(FORM_TOKEN, ""))
        return Authenticated(viewer.user, viewer.session.key)

    def tokenizer(self, base_model: str) -> EngineTokenizer | None:
        """The tokenizer of a base model, or None if it is not on this machine. May read files."""
        if self.engine is not None:
            models = self.engine.models
            return models.find(base_model).tokenizer if base_model in models.names else None
        if base_model not in self._tokenizers and self.models_home is not None:
            from tinkex.engine.model.catalog import find_local
            from tinkex.engine.model.tokenizer import EngineTokenizer

            try:
                directory = find_local(base_model, self.models_home)
                if directory is not None:
                    self._tokenizers[base_model] = EngineTokenizer(directory)
            except SetupError as error:
                logger.warning("tokens are shown as numbers: %s", error)
        return self._tokenizers.get(base_model)

    def check_form_token(self, session: BrowserSession, token: str) -> None:
        """Raises :class:`NotAllowed` for a request that is not of a page of this session."""
        assert self.sessions is not None
        self.sessions.check_form_token(session, token, time.time())

    def form_token(self, viewer: Viewer) -> str:
        """What the scripts of a page send with requests that change something."""
        if viewer.session is None or self.sessions is None:
            return ""
        return self.sessions.form_token(viewer.session)


@dataclass(frozen=True)
class Visit:
    """A request for a page or its data."""

    site: Dashboard
    viewer: Viewer
    request: Request

    @property
    def query(self) -> Mapping[str, str]:
        """The query parameters."""
        return self.request.query_params

    @property
    def parameters(self) -> Mapping[str, str]:
        """The parameters in the path."""
        return self.request.path_params

    @property
    def owner(self) -> str | None:
        """Whose objects are shown; None for those of all users."""
        return self.viewer.owner

    async def read(self, job: Callable[[], T]) -> T:
        """Read on a thread while the event loop serves others; the reads of one user run one after the other."""
        if self.site.engine is None:
            return await asyncio.to_thread(job)
        return await self.site.engine.run_on_thread(self.viewer.user, job)

    def run(self, run_id: str) -> ListedRun:
        """A run that the viewer may see."""
        run = self.site.listings.run(self.owner, run_id)
        if run is None:
            raise UnknownObject(
                f"there is no run {run_id!r} that you can see; choose one of the list of runs."
            )
        return run

    def page(self, template: str, section: str, title: str, **context: object) -> Response:
        """Returns a page with the frame that all have."""
        return render(template, **frame(self.site, self.viewer, section, title), **context)

    def events(self, events: AsyncGenerator[bytes, None]) -> Response:
        """Returns a stream of events."""
        return EventStream(events, SECURITY_HEADERS)

    async def until_change(
        self, seconds: float, changed: Callable[[], Awaitable[None]] | None = None
    ) -> bool:
        """Wait for a change, or a time; returns False if the stream must end: sign-in over, key revoked, server closing."""
        if not await self._wait(seconds, changed):
            return False
        try:
            self.site.viewer(self.request)
        except Unauthorized:
            return False
        return True

    async def _wait(self, seconds: float, changed: Callable[[], Awaitable[None]] | None) -> bool:
        engine = self.site.engine
        if engine is None:
            await asyncio.sleep(seconds)
            return True
        if changed is None:
            return await engine.pause(seconds)
        change = asyncio.ensure_future(changed())
        pause = asyncio.ensure_future(engine.pause(seconds))
        try:
            await asyncio.wait({change, pause}, return_when=asyncio.FIRST_COMPLETED)
            return not pause.done() or pause.result()
        finally:
            change.cancel()
            pause.cancel()
            await asyncio.gather(change, pause, return_exceptions=True)


Page: TypeAlias = Callable[[Visit], Awaitable[Response]]


def event(value: object, name: str = "message") -> bytes:
    """Encodes a server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"


ENDED = event({}, "ended")
"""The last event of a stream whose viewer must sign in again, or whose server closes."""
IDLE = KEEP_ALIVE


def frame(site: Dashboard, viewer: Viewer | None, section: str, title: str) -> dict[str, object]:
    """What every page has around its content."""
    return {
        "section": section,
        "title": title,
        "viewer": viewer,
        "form_token": site.form_token(viewer) if viewer is not None else "",
        "has_engine": site.engine is not None,
        "has_keys": site.has_keys,
        "version": __version__,
    }


def serve_page(site: Dashboard, page: Page) -> Callable[[Request], Awaitable[Response]]:
    """Returns the endpoint of a page: whatever is wrong becomes a page that says so."""

    async def answer(visit_request: Request) -> Response:
        return await _answer(site, page, visit_request, _error_page)

    return _counted(site, answer)


def serve_data(site: Dashboard, page: Page) -> Callable[[Request], Awaitable[Response]]:
    """Returns the endpoint of what scripts fetch: whatever is wrong becomes JSON with a ``detail``."""

    async def answer(visit_request: Request) -> Response:
        return await _answer(site, page, visit_request, _error_data)

    return _counted(site, answer)


def _counted(
    site: Dashboard, answer: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        started = time.monotonic()
        request_id = request_id_of(dict(request.headers))
        response = await answer(request)
        response.headers[REQUEST_ID] = request_id
        duration_s = time.monotonic() - started
        site.request_metrics.record(METRICS_NAME, response.status_code, duration_s, request_id, "")
        return response

    return serve


async def _answer(
    site: Dashboard,
    page: Page,
    request: Request,
    describe: Callable[[Dashboard, Request, EngineError], Response],
) -> Response:
    try:
        if site.engine is not None and site.engine.closed:
            raise ModelUnavailable("this server is closing; reload the page when it is back.")
        check_same_origin(request.method, request.headers)
        return await page(Visit(site, site.viewer(request), request))
    except EngineError as error:
        return describe(site, request, error)
    except TinkexError as error:
        return describe(site, request, EngineFailure(str(error)))
    except sqlite3.Error as error:
        logger.warning("a page cannot be read: %s", error)
        return describe(
            site, request, StorageUnavailable(f"the database cannot be read ({error}); try again.")
        )
    except ClientDisconnect:
        return data({})
    except Exception as error:  # logged, and a page that says so
        logger.exception("a page failed unexpectedly")
        return describe(
            site, request, EngineFailure(f"internal error: {type(error).__name__}; see the server's log.")
        )


def _error_data(_site: Dashboard, _request: Request, error: EngineError) -> Response:
    response = error_response(error)
    response.headers.update(SECURITY_HEADERS)
    return response


def _error_page(site: Dashboard, request: Request, error: EngineError) -> Response:
    if isinstance(error, Unauthorized):
        if is_foreign(request.headers) and cookie_name(request) not in request.cookies:
            # A link on another site: browsers leave out a strict cookie. A page of this site that reloads gets it.
            return render("continue.html", address=address_of(request), **frame(site, None, "", "Opening"))
        problem = str(error) if cookie_name(request) in request.cookies else ""
        return sign_in_page(site, address_of(request), problem, 401)
    return error_page(site, request, error)


def error_page(site: Dashboard, request: Request, error: EngineError) -> Response:
    """Returns a page that says what is wrong."""
    try:
        viewer = site.viewer(request)
    except TinkexError:
        viewer = None
    status = status_of(error)
    titles = {403: "Not allowed", 404: "Not found", 410: "Gone", 400: "Not possible"}
    title = titles.get(status, "Something went wrong")
    return render("error.html", status, problem=str(error), code=status, **frame(site, viewer, "", title))


def sign_in_page(site: Dashboard, address: str, problem: str, status: int) -> Response:
    """Returns the page with the form to sign in, from which the browser continues at an address."""
    return render(
        "sign_in.html", status, address=address, problem=problem, **frame(site, None, "", "Sign in")
    )


def address_of(request: Request) -> str:
    """The path and query of a request."""
    query = f"?{request.url.query}" if request.url.query else ""
    return f"{quote(request.url.path, safe='/:')}{query}"


def with_query(path: str, **parameters: object) -> str:
    """An address with the parameters that are not empty.

    >>> with_query("/runs", text="sft", page=2, owner="")
    '/runs?text=sft&page=2'
    """
    given = {name: value for name, value in parameters.items() if value not in {"", None}}
    return f"{path}?{urlencode(given)}" if given else path
