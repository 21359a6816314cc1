"""``SampleRequest``, under the path of the official SDK."""

from tinkex.types import SampleRequest

__all__ = ["SampleRequest"]
