"""The ``_async`` forms of client methods, derived from the methods themselves.

A method is written once, with its signature and docstring; the class body names its async form::

    def get_session(self, session_id: str) -> AwaitableConcurrentFuture[types.GetSessionResponse]:
        ...

    get_session_async = async_form(get_session)

Type checkers and ``inspect`` see coroutine functions with the same parameters. Each calls the method by its name, so that
a subclass or a program that replaces the method replaces both. They are deprecated: the method itself can be awaited.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

from tinkex._runtime import APIFuture, await_future
from tinkex.clients._warnings import deprecate_async

__all__ = ["async_form", "async_iterator"]

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_RESULT = re.compile(r"(?:AwaitableConcurrentFuture|APIFuture)\[(.*)\]|Pending(.*Client)", re.DOTALL)
_PENDING_VALUES = {
    "PendingText": "str",
    "PendingInfo": "types.GetInfoResponse",
    "PendingCapabilities": "types.GetServerCapabilitiesResponse",
}


@overload
def async_form(
    method: Callable[Concatenate[S, P], APIFuture[T]], *, returns_future: Literal[False] = False
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]: ...
@overload
def async_form(
    method: Callable[Concatenate[S, P], T], *, returns_future: Literal[True]
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]: ...
def async_form(
    method: Callable[..., Any], *, returns_future: bool = False
) -> Callable[..., Coroutine[Any, Any, Any]]:
    """The async form of a method: it returns the result, and its cancellation cancels the operation.

    With ``returns_future`` it returns the future of the operation, which is awaited in turn.
    """
    name = method.__name__

    async def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        returned = getattr(self, name)(*args, **kwargs)
        if returns_future:
            return returned
        if not isinstance(returned, Future) and isinstance(returned, APIFuture):
            returned = returned.future()
        # Anything else comes from a program that has replaced the method by one that returns the result.
        return (
            await await_future(returned, propagate_cancel=True) if isinstance(returned, Future) else returned
        )

    how = "; await the returned future for the result" if returns_future else ", awaited"
    returns = inspect.signature(method).return_annotation
    doc = f"Deprecated: as :meth:`{name}`{how}."
    returned_type = returns if returns_future else _result_type(returns)
    return deprecate_async(_describe(call, method, f"{name}_async", doc, returned_type))


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


def _result_type(returns: Any) -> Any:
    """The type of a method's result, without the future around it; annotations are strings in this package."""
    match = _RESULT.fullmatch(returns) if isinstance(returns, str) else None
    return _PENDING_VALUES.get(returns, returns) if match is None else match[1] or match[2]


def _describe(call: F, method: Callable[..., Any], name: str, doc: str | None, returns: Any) -> F:
    """Gives ``call`` a name, a docstring, and the signature of ``method`` with another return type."""
    described: Any = call
    described.__name__, described.__doc__ = name, doc
    described.__qualname__ = f"{method.__qualname__.rpartition('.')[0]}.{name}"
    described.__module__ = method.__module__
    described.__signature__ = inspect.signature(method).replace(return_annotation=returns)
    described.__annotations__ = {**method.__annotations__, "return": returns}
    return call
