"""Captures exceptions that leave a block or function: reports them by category and re-raises them."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from tinkex.observability.telemetry.reporter import Reporter

__all__ = ["capture"]

F = TypeVar("F", bound=Callable[..., Any])


class HasTelemetry(Protocol):
    """A client, with or without a reporter."""

    def get_telemetry(self) -> Reporter | None:
        """Returns the reporter of the client's session."""
        ...


class capture:  # noqa: N801 - used like a function
    """A context manager and decorator, for sync and async functions, that reports exceptions.

    The exception propagates unchanged; reporting never delays or replaces it.

    >>> @capture(None)
    ... def step(n: int) -> int:
    ...     return n + 1
    >>> step(1)
    2
    """

    def __init__(self, client: HasTelemetry | Reporter | None, *, fatal: bool = False) -> None:
        if not (
            client is None or isinstance(client, Reporter) or callable(getattr(client, "get_telemetry", None))
        ):
            raise TypeError(
                f"capture takes a client, its Reporter or None, got {type(client).__name__}; pass your ServiceClient"
            )
        self._client = client
        self._fatal = fatal

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # KeyboardInterrupt, SystemExit and CancelledError are not failures.
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):  # must not replace the propagating exception
                self._report(error)

    def _report(self, error: Exception) -> None:
        client = self._client
        reporter = client if client is None or isinstance(client, Reporter) else client.get_telemetry()
        if reporter is not None:
            reporter.log_exception(error, fatal=self._fatal)

    def __call__(self, function: F) -> F:
        """Decorates a function so that its exceptions are reported."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{function.__name__} is a generator, whose body runs during iteration; write `with capture(…):` "
                "inside it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(*args: Any, **options: Any) -> Any:
                with capture(self._client, fatal=self._fatal):
                    return await function(*args, **options)

            return run_async  # type: ignore[return-value]

        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            with capture(self._client, fatal=self._fatal):
                return function(*args, **options)

        return run  # type: ignore[return-value]
