"""``TryAgainResponse``, under the path of the official SDK."""

from tinkex.types import TryAgainResponse

__all__ = ["TryAgainResponse"]
