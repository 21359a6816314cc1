"""``AuthTokenResponse``, under the path of the official SDK."""

from tinkex.types import AuthTokenResponse

__all__ = ["AuthTokenResponse"]
