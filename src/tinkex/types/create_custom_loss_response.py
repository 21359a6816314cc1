"""``CreateCustomLossResponse``, under the path of the official SDK."""

from tinkex.types import CreateCustomLossResponse

__all__ = ["CreateCustomLossResponse"]
