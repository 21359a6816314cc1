"""``WhoamiResponse``, under the path of the official SDK."""

from tinkex.types import WhoamiResponse

__all__ = ["WhoamiResponse"]
