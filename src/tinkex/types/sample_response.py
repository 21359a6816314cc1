"""``SampleResponse``, under the path of the official SDK."""

from tinkex.types import SampleResponse

__all__ = ["SampleResponse"]
