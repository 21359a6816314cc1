"""Results that can be used or awaited: a future that stands in for the client or value it will return.

    client = service.create_lora_training_client("model")            # used as it is
    client = service.create_lora_training_client("model").result()   # or its result
    client = await service.create_lora_training_client("model")      # or awaited

Without a running event loop the call itself waits. On an event loop it returns immediately; what is used before it was awaited blocks
the loop, with a warning, except for methods of a client whose results can be awaited: these are called when the client is there.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tinkex._runtime import (
    APIFuture,
    AwaitableConcurrentFuture,
    await_future,
    background,
    check_may_block,
    on_event_loop,
)
from tinkex.clients._warnings import warn_caller
from tinkex.errors import TinkexError

if TYPE_CHECKING:
    from tinkex import types
    from tinkex.clients.rest import RestClient
    from tinkex.clients.sampling import SamplingClient
    from tinkex.clients.training import TrainingClient
    from tinkex.tokenizers import Tokenizer

    # What type checkers see: every style of use is valid.
    class PendingTrainingClient(TrainingClient, APIFuture[TrainingClient]):
        """A training client, or the future of one."""

    class PendingSamplingClient(SamplingClient, APIFuture[SamplingClient]):
        """A sampling client, or the future of one."""

    class PendingRestClient(RestClient, APIFuture[RestClient]):
        """A REST client, or the future of one."""

    class PendingInfo(types.GetInfoResponse, APIFuture[types.GetInfoResponse], frozen=True):  # type: ignore[metaclass]
        """The properties of a run, or their future."""

    class PendingCapabilities(  # type: ignore[metaclass]
        types.GetServerCapabilitiesResponse, APIFuture[types.GetServerCapabilitiesResponse], frozen=True
    ):
        """The capabilities of a server, or their future."""

    class PendingTokenizer(Tokenizer, APIFuture[Tokenizer]):
        """A tokenizer, or the future of one."""


__all__ = [
    "Pending",
    "PendingSamplingClient",
    "PendingText",
    "PendingTrainingClient",
    "PendingValue",
    "pending_sampling_client",
    "pending_text",
    "pending_training_client",
    "pending_value",
]

T = TypeVar("T")

_UNSET: Any = object()


class Pending(APIFuture[T]):
    """The future of a client, with the attributes and the class of that client.

    ``source`` creates it. Without ``lazy`` and without a running event loop the constructor waits for it and raises its error.
    """

    __slots__ = ("__calls", "__hash", "__kind", "__lock", "__started", "__value", "__weakref__")
    __calls: list[tuple[Callable[[T], Any], AwaitableConcurrentFuture[Any]]] | None
    """Calls of methods of a client that is not there yet, with their futures; None if there can be no more."""
    __hash: int | None
    """Its hash, once it was computed: it must not change when the result is there."""
    __kind: type[T] | None
    __lock: threading.Lock
    __started: AwaitableConcurrentFuture[T]
    __value: T

    def __init__(
        self,
        kind: type[T] | None,
        source: Coroutine[Any, Any, T] | Future[T],
        *,
        lazy: bool = False,
    ) -> None:
        _set(self, "kind", kind)
        _set(self, "value", _UNSET)
        _set(self, "calls", [])
        _set(self, "hash", None)
        _set(self, "lock", threading.Lock())
        started = background().submit(self.__run(source), self.__end)
        _set(self, "started", started)
        if not lazy and not on_event_loop():
            background().wait(started)

    @classmethod
    def of(cls, value: T) -> Self:
        """The future of a client that is there."""
        pending = cls.__new__(cls)
        started: AwaitableConcurrentFuture[T] = AwaitableConcurrentFuture()
        started.set_result(value)
        fields = {"kind": type(value), "value": value, "calls": None, "hash": None, "started": started}
        for name, content in fields.items():
            _set(pending, name, content)
        return pending

    async def __run(self, source: Coroutine[Any, Any, T] | Future[T]) -> T:
        value = await (await_future(source, propagate_cancel=True) if isinstance(source, Future) else source)
        # Under the lock, so that a call of another thread cannot overtake these. What waiters call comes after them.
        with self.__lock:
            for make, call in self.__calls or ():
                call.run(functools.partial(make, value))
            _set(self, "calls", None)
            _set(self, "value", value)
        return value

    def __end(self, error: BaseException | None) -> None:
        if error is not None:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            with self.__lock:
                for _, call in self.__calls or ():
                    call.follow(failed)
                _set(self, "calls", None)

    # ---- the future ----

    def result(self, timeout: float | None = None) -> T:
        """The client or value itself; waits up to ``timeout`` seconds, without limit by default."""
        return self.__started.result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        """The client or value itself, on any event loop."""
        return await self.__started.result_async(timeout)

    def future(self) -> Future[T]:
        """The future of the client or value, for callbacks and ``concurrent.futures.wait``."""
        return self.__started

    # ---- what it stands for ----

    def _awaited(self) -> T:
        """The client or value; an event loop is blocked until it is there, with a warning."""
        value = self.__value
        if value is not _UNSET:
            return value
        if not self.__started.done() and on_event_loop():
            check_may_block()
            warn_caller(
                "a result was used before it was awaited, which blocks the event loop until it is there; "
                "await the call",
                RuntimeWarning,
            )
        return self.__started.result()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.__kind is not None:
            return self.__kind
        return type(self) if self.__value is _UNSET else type(self.__value)

    def __getattr__(self, name: str) -> Any:
        if self.__value is not _UNSET:
            return getattr(self.__value, name)
        if not self.__started.done() and on_event_loop():
            if name.startswith(("__", "_ipython_", "_repr_")):  # what copy, inspect and notebooks look for
                raise AttributeError(name)
            method = getattr(self.__kind, name, None)
            if name.endswith("_async") and callable(method):
                return lambda *args, **options: self.__call_async(name, args, options)
            returns = str(getattr(method, "__annotations__", {}).get("return", ""))
            if returns.startswith("AwaitableConcurrentFuture["):
                return lambda *args, **options: self.__call_later(name, args, options)
            if returns.startswith("Pending"):
                return lambda *args, **options: _pending_as(returns, self.__call_later(name, args, options))
        return getattr(self._awaited(), name)

    async def __call_async(self, name: str, args: Any, options: Any) -> Any:
        return await getattr(await self, name)(*args, **options)

    def __call_later(self, name: str, args: Any, options: Any) -> Any:
        with self.__lock:
            if self.__calls is not None:
                call: AwaitableConcurrentFuture[Any] = AwaitableConcurrentFuture()
                run = contextvars.copy_context().run
                self.__calls.append((lambda value: run(getattr(value, name), *args, **options), call))
                return call
            if self.__value is _UNSET:
                return AwaitableConcurrentFuture(self.__started)  # which raises its error
        return getattr(self.__value, name)(*args, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._awaited(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._awaited(), name)

    def __eq__(self, other: object) -> bool:
        return self is other or bool(self._awaited() == _plain(other))

    def __hash__(self) -> int:
        if self.__hash is None:
            # Without waiting, and also of a value that has none: asyncio.gather hashes what it is given.
            found = object.__hash__(self)
            if self.__value is not _UNSET:
                with contextlib.suppress(TypeError):
                    found = hash(self.__value)
            _set(self, "hash", found)
            return found
        return self.__hash

    def __repr__(self) -> str:
        if self.__value is _UNSET and not self.__started.done():
            return f"<{'result' if self.__kind is None else self.__kind.__name__}, pending>"
        return repr(self._awaited())

    def __dir__(self) -> list[str]:
        return sorted({*APIFuture.__dict__, *dir(self.__kind if self.__value is _UNSET else self.__value)})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._awaited().__reduce_ex__(protocol)


class PendingValue(Pending[T]):
    """The future of a value, with the operators of that value too."""

    __slots__ = ()

    def __str__(self) -> str:
        return str(self._awaited())

    def __format__(self, spec: str) -> str:
        return format(self._awaited(), spec)

    def __bool__(self) -> bool:
        return bool(self._awaited())

    def __len__(self) -> int:
        return len(self._awaited())  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        return iter(self._awaited())  # type: ignore[call-overload]

    def __contains__(self, item: object) -> bool:
        return item in self._awaited()  # type: ignore[operator]

    def __getitem__(self, key: Any) -> Any:
        return self._awaited()[key]  # type: ignore[index]

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._awaited()(*args, **options)  # type: ignore[operator]

    def __add__(self, other: Any) -> Any:
        return self._awaited() + _plain(other)

    def __radd__(self, other: Any) -> Any:
        return other + self._awaited()

    def __mod__(self, other: Any) -> Any:
        return self._awaited() % other

    def __lt__(self, other: Any) -> bool:
        return bool(self._awaited() < _plain(other))

    def __le__(self, other: Any) -> bool:
        return bool(self._awaited() <= _plain(other))

    def __gt__(self, other: Any) -> bool:
        return bool(self._awaited() > _plain(other))

    def __ge__(self, other: Any) -> bool:
        return bool(self._awaited() >= _plain(other))

    def __fspath__(self) -> str:
        return os.fspath(self._awaited())  # type: ignore[call-overload,no-any-return]


if not TYPE_CHECKING:
    PendingTrainingClient, PendingSamplingClient = (
        type(name, (Pending,), {"__slots__": (), "__doc__": f"A {kind} client, or the future of one."})
        for name, kind in (("PendingTrainingClient", "training"), ("PendingSamplingClient", "sampling"))
    )


class PendingText(str, APIFuture[str]):
    """A string that is its own future.

    >>> name = PendingText("model")
    >>> name.result(), name.upper()
    ('model', 'MODEL')
    """

    __slots__ = ()

    def result(self, timeout: float | None = None) -> str:  # noqa: ARG002 - it is there
        """The string."""
        return str(self)

    async def result_async(self, timeout: float | None = None) -> str:  # noqa: ARG002 - it is there
        """The string."""
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


def pending_training_client(
    source: Coroutine[Any, Any, TrainingClient], *, lazy: bool
) -> PendingTrainingClient:
    """The future of a training client; ``source`` creates it."""
    from tinkex.clients.training import TrainingClient  # which imports this module

    pending: Any = PendingTrainingClient
    if lazy or on_event_loop():
        source = _informed(source, "get_info")
    return pending(TrainingClient, source, lazy=lazy)  # type: ignore[no-any-return]


def pending_sampling_client(
    source: Coroutine[Any, Any, SamplingClient] | Future[SamplingClient], *, lazy: bool = False
) -> PendingSamplingClient:
    """The future of a sampling client; ``source`` creates it."""
    from tinkex.clients.sampling import SamplingClient  # which imports this module

    pending: Any = PendingSamplingClient
    if lazy or on_event_loop():
        source = _informed(source, "get_base_model")
    return pending(SamplingClient, source, lazy=lazy)  # type: ignore[no-any-return]


async def _informed(source: Coroutine[Any, Any, T] | Future[T], method: str) -> T:
    """The client, once it also has the value of a method: programs for 0.38 use it on an event loop without awaiting it.

    If the value cannot be read, the client is usable without it, and the method raises the error.
    """
    client = await (await_future(source, propagate_cancel=True) if isinstance(source, Future) else source)
    with contextlib.suppress(TinkexError):
        await getattr(client, method)()
    return client


def pending_value(kind: type[T], known: T | None, read: Callable[[], Coroutine[Any, Any, T]]) -> Pending[T]:
    """The future of a value that is known, or that is read now."""
    return PendingValue(kind, read()) if known is None else PendingValue.of(known)


def pending_text(known: str | None, read: Callable[[], Coroutine[Any, Any, str]]) -> PendingText:
    """The future of a string: a ``str`` that is one too, where it is known or the call may wait for it."""
    if known is not None:
        return PendingText(known)
    value: PendingValue[str] = PendingValue(str, read())
    return value if on_event_loop() else PendingText(value.result())  # type: ignore[return-value]


def _pending_as(returns: str, result: Any) -> Any:
    """What a method returns that was put off: the future of a client or value, by the annotation of the method."""
    from tinkex import types

    if not isinstance(result, Future):
        return result  # the client was there after all
    match returns:
        case "PendingSamplingClient":
            return pending_sampling_client(result)
        case "PendingInfo":
            return PendingValue(types.GetInfoResponse, result)
        case "PendingText":
            return PendingValue(str, result)
        case _:
            return PendingValue(None, result)


def _set(pending: Pending[Any], name: str, value: Any) -> None:
    object.__setattr__(pending, f"_Pending__{name}", value)


def _plain(value: Any) -> Any:
    return value.result() if issubclass(type(value), Pending) else value
