"""``UnloadModelResponse``, under the path of the official SDK."""

from tinkex.types import UnloadModelResponse

__all__ = ["UnloadModelResponse"]
