"""The ``_async`` forms of client methods, derived from the methods themselves.

A method is written once, with its signature and docstring; the class body names its async form::

    def get_session(self, session_id: str) -> Future[types.GetSessionResponse]:
        ...

    get_session_async = async_result(get_session)

Type checkers and ``inspect`` see coroutine functions with the same parameters. Each calls the method by its name, so that
a subclass or a program that replaces the method replaces both.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from tinkex._runtime import await_future, background
from tinkex.futures import APIFuture, AwaitableConcurrentFuture

__all__ = ["async_call", "async_iterator", "async_result", "blocking"]

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_FUTURE = re.compile(r"(?:Future|APIFuture|AwaitableConcurrentFuture)\[(.*)\]", re.DOTALL)


def blocking(method: Callable[Concatenate[S, P], Future[T]]) -> Callable[Concatenate[S, P], T]:
    """Makes a method that returns a future block and return its result; an interrupt cancels the future."""

    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        loop = background()
        loop.check_may_block()
        return loop.wait(method(self, *args, **kwargs))

    call.start = method  # type: ignore[attr-defined]  # for async_call
    return _describe(call, method, method.__name__, method.__doc__, _result_type(method))


@overload
def async_result(
    method: Callable[Concatenate[S, P], Future[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]: ...
@overload
def async_result(
    method: Callable[Concatenate[S, P], APIFuture[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]: ...
def async_result(method: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """The async form of a method that returns a future: it returns the result; its cancellation cancels the future."""
    name = method.__name__

    async def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        future = getattr(self, name)(*args, **kwargs)
        if isinstance(future, AwaitableConcurrentFuture):
            future = future.future()
        return await await_future(future, propagate_cancel=True)

    return _describe(call, method, f"{name}_async", f"As :meth:`{name}`, awaited.", _result_type(method))


def async_call(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """The async form of a method, which returns the same.

    That is the future of a training operation, or the result of a :func:`blocking` method, without blocking.
    """
    name = method.__name__
    start: Callable[Concatenate[S, P], Future[T]] | None = getattr(method, "start", None)

    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if start is not None:
            return await await_future(start(self, *args, **kwargs), propagate_cancel=True)
        returned: T = getattr(self, name)(*args, **kwargs)
        return returned

    how = "without blocking" if start is not None else "await the returned future for the result"
    returns = inspect.signature(method).return_annotation
    return _describe(call, method, f"{name}_async", f"As :meth:`{name}`; {how}.", returns)


def async_iterator(
    method: Callable[Concatenate[S, P], AsyncIterable[T]],
) -> Callable[Concatenate[S, P], AsyncIterator[T]]:
    """The async form of a method whose iterator works with ``for`` and ``async for``: an async generator."""
    name = method.__name__

    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        async for item in getattr(self, name)(*args, **kwargs):
            yield item

    returns = inspect.signature(method).return_annotation
    return _describe(call, method, f"{name}_async", f"As :meth:`{name}`, with ``async for``.", returns)


def _result_type(method: Callable[..., Any]) -> Any:
    """The type of a method's result, without the future around it; annotations are strings in this package."""
    returns = inspect.signature(method).return_annotation
    match = _FUTURE.fullmatch(returns) if isinstance(returns, str) else None
    return returns if match is None else match[1]


def _describe(call: F, method: Callable[..., Any], name: str, doc: str | None, returns: Any) -> F:
    """Gives ``call`` a name, a docstring, and the signature of ``method`` with another return type."""
    described: Any = call
    described.__name__, described.__doc__ = name, doc
    described.__qualname__ = f"{method.__qualname__.rpartition('.')[0]}.{name}"
    described.__module__ = method.__module__
    described.__signature__ = inspect.signature(method).replace(return_annotation=returns)
    described.__annotations__ = {**method.__annotations__, "return": returns}
    return call
