"""``Datum``, under the path of the official SDK."""

from tinkex.types import Datum

__all__ = ["Datum"]
