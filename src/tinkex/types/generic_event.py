"""``GenericEvent``, under the path of the official SDK."""

from tinkex.types import GenericEvent

__all__ = ["GenericEvent"]
