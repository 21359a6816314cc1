"""``CreateModelResponse``, under the path of the official SDK."""

from tinkex.types import CreateModelResponse

__all__ = ["CreateModelResponse"]
