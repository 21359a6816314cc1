"""``ForwardBackwardInput``, under the path of the official SDK."""

from tinkex.types import ForwardBackwardInput

__all__ = ["ForwardBackwardInput"]
