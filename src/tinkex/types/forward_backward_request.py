"""``ForwardBackwardRequest``, under the path of the official SDK."""

from tinkex.types import ForwardBackwardRequest

__all__ = ["ForwardBackwardRequest"]
