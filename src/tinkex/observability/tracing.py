"""OpenTelemetry: spans of what a client does, where the program has set up a tracer provider.

Without one, and without the extra ``tinkex[otel]``, nothing is imported and next to nothing is done. With one, every
call of the user's is a span, every request it takes a child of it, and the trace goes on in the server.

Spans hold names, numbers and ids only: no headers, texts of errors, prompts, tokens or keys.

>>> begin("sample") is None  # this program has set up nothing
True
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeAlias, TypeVar
from urllib.parse import urlsplit

from tinkex._version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer, TracerProvider

    from tinkex.observability.events import Event

__all__ = [
    "Attempt",
    "Operation",
    "begin",
    "current",
    "end_span",
    "entered",
    "extracted",
    "find_tracer",
    "harmless",
    "operating",
    "use_provider",
]

logger = logging.getLogger("tinkex")

P = ParamSpec("P")
T = TypeVar("T")
Value: TypeAlias = str | bool | int | float | Sequence[str] | Sequence[int]


# ---- whether spans are made at all ----

_chosen: TracerProvider | None = None
_known: tuple[object, Tracer | None] | None = None


def find_tracer() -> Tracer | None:
    """What makes our spans, or None where the program has set up no tracer provider.

    A program that has one has imported OpenTelemetry, so there is no need to import it here to find out.
    """
    global _known  # noqa: PLW0603 - a fact about the process
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None or not hasattr(trace, "get_tracer_provider"):  # not imported, or not to its end
        return None
    provider = trace.get_tracer_provider() if _chosen is None else _chosen
    known = _known
    if known is None or known[0] is not provider:
        does_nothing = isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider)
        tracer = None if does_nothing else provider.get_tracer("tinkex", __version__)
        known = _known = (provider, tracer)
    return known[1]


def use_provider(provider: TracerProvider | None) -> None:
    """Has spans made by this provider, instead of by the one that is set for the whole program; None: by that one."""
    global _chosen  # noqa: PLW0603 - a setting of the process
    _chosen = provider


def harmless(function: Callable[P, T]) -> Callable[P, T | None]:
    """The function, with what it raises logged, and None instead of a value.

    Span processors of the program run where spans begin and end: whatever they do, its calls must go on.
    """

    @functools.wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> T | None:
        try:
            return function(*args, **options)
        except Exception:
            logger.exception("a span could not be made or ended")
            return None

    return run


# ---- what a span may say ----


def end_span(span: Span, error: BaseException | None = None) -> None:
    """Ends a span, and says how: of an error only its kind, for its text may quote anything."""
    if isinstance(error, asyncio.CancelledError):
        span.set_attributes({"tinkex.cancelled": True})
    elif error is not None:
        kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        span.set_attribute("error.type", kind)
        for name in ("status_code", "category"):
            value = getattr(error, name, None)
            if value is not None:
                span.set_attribute(f"tinkex.error.{name}", getattr(value, "value", value))
        span.add_event("exception", {"exception.type": kind})
        _mark_failed(span, type(error).__name__)
    span.end()


def _mark_failed(span: Span, what: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, what))


# ---- a call of the user's ----

_current: contextvars.ContextVar[Operation | None] = contextvars.ContextVar("tinkex_operation", default=None)


class Operation:
    """The span of one call of the user's, from the call to its result, whether or not anybody waits for it.

    It is made in the thread or task of the caller, so it belongs to what is traced there. Any thread may end it.
    """

    def __init__(self, tracer: Tracer, name: str) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer = tracer
        self._span = tracer.start_span(f"tinkex.{name}")
        self._context = set_span_in_context(self._span)
        self._lock = threading.Lock()
        self._over = False
        self._request_ids: list[str] = []
        self._outer = _current.get()
        self._num_inside = 0
        self._ends_with_those_inside = False
        if self._outer is not None:
            self._outer._enter_inside()  # noqa: SLF001 - one of us
        _remember(self)

    def note(self, facts: Mapping[str, Value | None]) -> None:
        """Adds facts, by the names of their attributes; those that are None are left out."""
        with self._lock:
            if not self._over:
                self._span.set_attributes({k: value for k, value in facts.items() if value is not None})

    def happened(self, event: str, facts: Mapping[str, Value]) -> None:
        """Notes that something happened on the way."""
        with self._lock:
            if not self._over:
                self._span.add_event(event, dict(facts))

    def emit(self, event: Event) -> None:
        """Adds an event of the client's about this operation to the span."""
        from tinkex.observability.events import QueueStateChanged

        if isinstance(event, QueueStateChanged):
            self.happened("tinkex.queue_state", {"tinkex.queue_state": event.state})

    def accepted(self, request_id: str) -> None:
        """Notes the server's name for the operation, or for a part of it."""
        self._request_ids.append(request_id)
        self.note({"tinkex.request_ids": tuple(self._request_ids)})

    def ended(self, error: BaseException | None = None) -> None:
        """Ends the span; the second time nothing happens."""
        with self._lock:
            if self._over:
                return
            self._over = True
        _open.discard(self)
        harmless(end_span)(self._span, error)
        if self._outer is not None:
            self._outer._leave_inside(error)  # noqa: SLF001 - one of us

    def ends_with_those_inside(self) -> None:
        """Ends the span as soon as no operation inside of it is under way."""
        with self._lock:
            self._ends_with_those_inside = True
            over = self._num_inside == 0
        if over:
            self.ended()

    def _enter_inside(self) -> None:
        with self._lock:
            self._num_inside += 1

    def _leave_inside(self, error: BaseException | None) -> None:
        with self._lock:
            self._num_inside -= 1
            over = self._ends_with_those_inside and self._num_inside == 0
        if over:
            self.ended(error)

    @contextlib.contextmanager
    def entered(self) -> Iterator[Self]:
        """Makes it the current operation of the block, and of the tasks that the block starts; an error ends it."""
        from opentelemetry.context import attach, detach

        mine, theirs = _current.set(self), attach(self._context)
        try:
            yield self
        except BaseException as error:
            self.ended(error)
            raise
        finally:
            detach(theirs)
            _current.reset(mine)

    @harmless
    def attempt(self, method: str, path: str, tries: int, base_url: str) -> Attempt:
        """One request of this operation, as a block."""
        return Attempt(self._tracer, self._context, method, path, tries, base_url)


class Attempt:
    """The span of one request; ``headers`` carry the trace to the server."""

    def __init__(
        self, tracer: Tracer, context: Context, method: str, path: str, tries: int, base_url: str
    ) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        template = path.replace(":path}", "}")
        facts: dict[str, str | int] = {
            "http.request.method": method,
            "url.template": template,
            **_server(base_url),
        }
        if tries:
            facts["http.request.resend_count"] = tries
        self._span = tracer.start_span(f"{method} {template}", context, SpanKind.CLIENT, facts)
        self._context = set_span_in_context(self._span, context)
        self.headers: dict[str, str] = _injected(self._context)

    def answered(self, status: int, *, failed: bool) -> None:
        """Notes the status that came back, and whether it is a failure."""
        self._span.set_attribute("http.response.status_code", status)
        if failed:
            self._span.set_attribute("error.type", str(status))
            _mark_failed(self._span, f"status {status}")

    def __enter__(self) -> Self:
        from opentelemetry.context import attach

        self._token = attach(self._context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from opentelemetry.context import detach

        detach(self._token)
        harmless(end_span)(self._span, error)


def begin(name: str, *, on: bool = True) -> Operation | None:
    """The span of a call that begins here; None where nothing is traced. Whoever has it must end it."""
    tracer = find_tracer() if on else None
    return None if tracer is None else harmless(Operation)(tracer, name)


def current() -> Operation | None:
    """The operation that the running task works for."""
    return _current.get()


def entered(operation: Operation | None) -> contextlib.AbstractContextManager[object]:
    """Makes an operation, if there is one, the current one of a block."""
    return contextlib.nullcontext() if operation is None else operation.entered()


@contextlib.contextmanager
def operating(name: str, *, on: bool = True) -> Iterator[Operation | None]:
    """Traces a block as an operation; inside of another one it is a part of that."""
    known = current()
    operation = begin(name, on=on) if known is None else None
    if operation is None:
        yield known
        return
    with operation.entered():
        yield operation
    operation.ended()


@functools.lru_cache(maxsize=64)
def _server(base_url: str) -> Mapping[str, str | int]:
    parts = urlsplit(base_url)
    if parts.hostname is None:
        return {"server.address": base_url}
    return {
        "server.address": parts.hostname,
        "server.port": parts.port or (443 if parts.scheme == "https" else 80),
    }


# ---- from one process to another ----


@functools.lru_cache(maxsize=1)
def _propagation() -> Any:
    """What writes and reads the headers of a trace; None where it was configured in a way it cannot be used."""
    try:
        from opentelemetry import propagate
    except Exception as error:  # noqa: BLE001 - logged; a misspelt variable must not stop the program's own calls
        logger.warning("traces are not passed on, because OTEL_PROPAGATORS cannot be used: %s", error)
        return None
    return propagate


def _injected(context: Context) -> dict[str, str]:
    headers: dict[str, str] = {}
    propagation = _propagation()
    if propagation is not None:
        propagation.inject(headers, context)
    return headers


def extracted(headers: Mapping[str, str]) -> Context:
    """The trace that a request belongs to, by its headers; nothing of what is traced here otherwise."""
    from opentelemetry.context import Context

    propagation = _propagation()
    context: Context = Context() if propagation is None else propagation.extract(headers, Context())
    return context


# ---- the end of the program ----

_open: set[Operation] = set()
_hooked = False


def _remember(operation: Operation) -> None:
    """Sees to it that the span ends with the program, before the provider, which is older, hands in what it has."""
    global _hooked  # noqa: PLW0603 - once per process
    if not _hooked:
        _hooked = True
        atexit.register(_end_all)
        if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
            os.register_at_fork(after_in_child=_open.clear)  # they end where they began
    _open.add(operation)


def _end_all() -> None:
    for operation in list(_open):
        operation.note({"tinkex.unfinished": True})
        operation.ended(asyncio.CancelledError())
