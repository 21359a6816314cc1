"""Warnings that point at the user's own line, however many of our functions are between."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from types import FrameType

    from tinkex.config import Config

__all__ = ["deprecate", "deprecate_async", "warn_about_deprecated_names", "warn_caller"]

PACKAGE = str(Path(__file__).parents[1])
PENDING = str(Path(__file__).with_name("_pending.py"))
"""It calls methods for the program, when the client is there."""

F = TypeVar("F", bound=Callable[..., Any])


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warns at the line outside of this package that led to the call."""
    stacklevel = 1
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - what the warnings module uses itself
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
        stacklevel += 1
    warnings.warn(message, category, stacklevel=stacklevel)


def deprecate(instead: str) -> Callable[[F], F]:
    """Marks a method as deprecated, with what programs do ``instead``."""

    def mark(function: F) -> F:
        function.__deprecated__ = instead  # type: ignore[attr-defined]  # as typing_extensions.deprecated
        return function

    return mark


def deprecate_async(function: F) -> F:
    """Marks the ``_async`` form of a method as deprecated; the method itself can be awaited."""
    return deprecate(f"await {function.__name__.removesuffix('_async')}(…) instead")(function)


def warn_about_deprecated_names(client: Any, config: Config) -> None:
    """Makes the deprecated methods of a client warn at the line that calls them, only if the settings ask for it.

    A coroutine cannot do this itself: when it starts, in a task, the line that made it is not on the stack.
    """
    if config.deprecation_warnings:
        for name, _ in inspect.getmembers(type(client), lambda member: hasattr(member, "__deprecated__")):
            setattr(client, name, _warning(client, name))


def _warning(client: Any, name: str) -> Callable[..., Any]:
    method = getattr(type(client), name)
    message = f"{type(client).__name__}.{name} is deprecated; {method.__deprecated__}"

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        stacklevel = 2
        frame = sys._getframe(1)  # noqa: SLF001 - what the warnings module uses itself
        while frame.f_code.co_filename == PENDING and frame.f_back is not None:
            frame, stacklevel = frame.f_back, stacklevel + 1
        if not frame.f_code.co_filename.startswith(PACKAGE):  # called by the program
            warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)
        return getattr(type(client), name)(client, *args, **options)  # which a program may have replaced

    if not inspect.iscoroutinefunction(method):
        return call
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(call)
    call._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001
    return call
