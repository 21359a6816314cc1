"""``ForwardRequest``, under the path of the official SDK."""

from tinkex.types import ForwardRequest

__all__ = ["ForwardRequest"]
