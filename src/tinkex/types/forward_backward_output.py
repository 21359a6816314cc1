"""``ForwardBackwardOutput``, under the path of the official SDK."""

from tinkex.types import ForwardBackwardOutput

__all__ = ["ForwardBackwardOutput"]
