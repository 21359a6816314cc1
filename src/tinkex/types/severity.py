"""``Severity``, under the path of the official SDK."""

from tinkex.types import Severity

__all__ = ["Severity"]
