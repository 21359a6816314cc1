"""OpenTelemetry spans of a client's calls, if the program has set up a tracer provider.

Without one, and without the extra ``tinkex[otel]``, nothing is imported and the cost is negligible. With one, every
call is a span, every request it sends is a child span, and the trace continues in the server.

Spans hold names, numbers and ids only: no headers, error messages, prompts, tokens or keys.

>>> start_operation("sample") is None  # this program has no tracer provider
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
    "OperationSpan",
    "RequestSpan",
    "current",
    "end_span",
    "extract_context",
    "find_tracer",
    "log_errors",
    "start_operation",
    "trace_operation",
    "use_operation",
    "use_provider",
]

logger = logging.getLogger("tinkex")

P = ParamSpec("P")
T = TypeVar("T")
Value: TypeAlias = str | bool | int | float | Sequence[str] | Sequence[int]


# ---- tracer ----

_provider: TracerProvider | None = None
_cached_tracer: tuple[object, Tracer | None] | None = None


def find_tracer() -> Tracer | None:
    """Returns the tracer for our spans, or None if the program has set up no tracer provider.

    A program that has one has imported OpenTelemetry already, so this function never imports it.
    """
    global _cached_tracer  # noqa: PLW0603 - a fact about the process
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None or not hasattr(trace, "get_tracer_provider"):  # not imported, or partially imported
        return None
    provider = trace.get_tracer_provider() if _provider is None else _provider
    cached = _cached_tracer
    if cached is None or cached[0] is not provider:
        is_noop = isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider)
        tracer = None if is_noop else provider.get_tracer("tinkex", __version__)
        cached = _cached_tracer = (provider, tracer)
    return cached[1]


def use_provider(provider: TracerProvider | None) -> None:
    """Uses this tracer provider instead of the global one; None restores the global one."""
    global _provider  # noqa: PLW0603 - a setting of the process
    _provider = provider


def log_errors(function: Callable[P, T]) -> Callable[P, T | None]:
    """Decorates a function to log what it raises and return None instead.

    The program's span processors run when spans start and end; an exception of theirs must not fail the call.
    """

    @functools.wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> T | None:
        try:
            return function(*args, **options)
        except Exception:
            logger.exception("a span could not be started or ended")
            return None

    return run


# ---- span attributes ----


def end_span(span: Span, error: BaseException | None = None) -> None:
    """Ends a span and records the error's type, but not its message, which may quote user data."""
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
        _set_error(span, type(error).__name__)
    span.end()


def _set_error(span: Span, what: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, what))


# ---- operations ----

_current: contextvars.ContextVar[OperationSpan | None] = contextvars.ContextVar(
    "tinkex_operation", default=None
)


class OperationSpan:
    """The span of one call, from the call to its result, whether or not the caller waits for the result.

    It is created in the caller's thread or task, as a child of the current span there. Any thread may end it.
    """

    def __init__(self, tracer: Tracer, name: str) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer = tracer
        self._span = tracer.start_span(f"tinkex.{name}")
        self._context = set_span_in_context(self._span)
        self._lock = threading.Lock()
        self._ended = False
        self._request_ids: list[str] = []
        self._parent = _current.get()
        self._num_children = 0
        self._end_with_children = False
        if self._parent is not None:
            self._parent._add_child()  # noqa: SLF001 - one of us
        _end_at_exit(self)

    def set_attributes(self, attributes: Mapping[str, Value | None]) -> None:
        """Sets attributes of the span; values that are None are skipped."""
        with self._lock:
            if not self._ended:
                self._span.set_attributes({k: value for k, value in attributes.items() if value is not None})

    def add_event(self, event: str, attributes: Mapping[str, Value]) -> None:
        """Adds an event to the span."""
        with self._lock:
            if not self._ended:
                self._span.add_event(event, dict(attributes))

    def emit(self, event: Event) -> None:
        """Adds a client event about this operation to the span."""
        from tinkex.observability.events import QueueStateChanged

        if isinstance(event, QueueStateChanged):
            self.add_event("tinkex.queue_state", {"tinkex.queue_state": event.state})

    def add_request_id(self, request_id: str) -> None:
        """Records the server's id of the operation, or of one of its requests."""
        self._request_ids.append(request_id)
        self.set_attributes({"tinkex.request_ids": tuple(self._request_ids)})

    def end(self, error: BaseException | None = None) -> None:
        """Ends the span; idempotent."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        _open.discard(self)
        log_errors(end_span)(self._span, error)
        if self._parent is not None:
            self._parent._child_ended(error)  # noqa: SLF001 - one of us

    def end_with_children(self) -> None:
        """Ends the span as soon as no child operation is in flight."""
        with self._lock:
            self._end_with_children = True
            should_end = self._num_children == 0
        if should_end:
            self.end()

    def _add_child(self) -> None:
        with self._lock:
            self._num_children += 1

    def _child_ended(self, error: BaseException | None) -> None:
        with self._lock:
            self._num_children -= 1
            should_end = self._end_with_children and self._num_children == 0
        if should_end:
            self.end(error)

    @contextlib.contextmanager
    def activate(self) -> Iterator[Self]:
        """Makes this the current operation of the block and of tasks started in it; an exception ends the span."""
        from opentelemetry.context import attach, detach

        mine, theirs = _current.set(self), attach(self._context)
        try:
            yield self
        except BaseException as error:
            self.end(error)
            raise
        finally:
            detach(theirs)
            _current.reset(mine)

    @log_errors
    def start_request(self, method: str, path: str, attempt: int, base_url: str) -> RequestSpan:
        """Starts the span of one request of this operation; a context manager."""
        return RequestSpan(self._tracer, self._context, method, path, attempt, base_url)


class RequestSpan:
    """The span of one request; ``headers`` propagate the trace context to the server."""

    def __init__(
        self, tracer: Tracer, context: Context, method: str, path: str, attempt: int, base_url: str
    ) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        template = path.replace(":path}", "}")
        attributes: dict[str, str | int] = {
            "http.request.method": method,
            "url.template": template,
            **_server(base_url),
        }
        if attempt:
            attributes["http.request.resend_count"] = attempt
        self._span = tracer.start_span(f"{method} {template}", context, SpanKind.CLIENT, attributes)
        self._context = set_span_in_context(self._span, context)
        self.headers: dict[str, str] = _inject(self._context)

    def record_status(self, status: int, *, failed: bool) -> None:
        """Records the response status, and whether it is a failure."""
        self._span.set_attribute("http.response.status_code", status)
        if failed:
            self._span.set_attribute("error.type", str(status))
            _set_error(self._span, f"status {status}")

    def __enter__(self) -> Self:
        from opentelemetry.context import attach

        self._token = attach(self._context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from opentelemetry.context import detach

        detach(self._token)
        log_errors(end_span)(self._span, error)


def start_operation(name: str, *, on: bool = True) -> OperationSpan | None:
    """Starts the span of a call; returns None if tracing is off. The caller must end it."""
    tracer = find_tracer() if on else None
    return None if tracer is None else log_errors(OperationSpan)(tracer, name)


def current() -> OperationSpan | None:
    """Returns the span of the operation that the running task is part of."""
    return _current.get()


def use_operation(operation: OperationSpan | None) -> contextlib.AbstractContextManager[object]:
    """Makes an operation, if there is one, the current operation of a block."""
    return contextlib.nullcontext() if operation is None else operation.activate()


@contextlib.contextmanager
def trace_operation(name: str, *, on: bool = True) -> Iterator[OperationSpan | None]:
    """Traces a block as an operation; inside another operation it adds no span of its own."""
    outer = current()
    operation = start_operation(name, on=on) if outer is None else None
    if operation is None:
        yield outer
        return
    with operation.activate():
        yield operation
    operation.end()


@functools.lru_cache(maxsize=64)
def _server(base_url: str) -> Mapping[str, str | int]:
    parts = urlsplit(base_url)
    if parts.hostname is None:
        return {"server.address": base_url}
    return {
        "server.address": parts.hostname,
        "server.port": parts.port or (443 if parts.scheme == "https" else 80),
    }


# ---- context propagation ----


@functools.lru_cache(maxsize=1)
def _propagator() -> Any:
    """Returns the module that injects and extracts trace headers; None if its configuration is invalid."""
    try:
        from opentelemetry import propagate
    except Exception as error:  # noqa: BLE001 - logged; a misspelt variable must not fail the program's calls
        logger.warning("trace context is not propagated, because OTEL_PROPAGATORS is invalid: %s", error)
        return None
    return propagate


def _inject(context: Context) -> dict[str, str]:
    headers: dict[str, str] = {}
    propagation = _propagator()
    if propagation is not None:
        propagation.inject(headers, context)
    return headers


def extract_context(headers: Mapping[str, str]) -> Context:
    """Returns the trace context in a request's headers; an empty one, not the current one, if there is none."""
    from opentelemetry.context import Context

    propagation = _propagator()
    context: Context = Context() if propagation is None else propagation.extract(headers, Context())
    return context


# ---- interpreter exit ----

_open: set[OperationSpan] = set()
_hooked = False


def _end_at_exit(operation: OperationSpan) -> None:
    """Ends the span at interpreter exit; exit hooks run last in first out, so this runs before the provider's flush."""
    global _hooked  # noqa: PLW0603 - once per process
    if not _hooked:
        _hooked = True
        atexit.register(_end_all)
        if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
            os.register_at_fork(after_in_child=_open.clear)  # the parent ends them
    _open.add(operation)


def _end_all() -> None:
    for operation in list(_open):
        operation.set_attributes({"tinkex.unfinished": True})
        operation.end(asyncio.CancelledError())
