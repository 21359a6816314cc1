"""``UnhandledExceptionEvent``, under the path of the official SDK."""

from tinkex.types import UnhandledExceptionEvent

__all__ = ["UnhandledExceptionEvent"]
