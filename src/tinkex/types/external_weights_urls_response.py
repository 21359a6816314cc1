"""``ExternalWeightsUrlsResponse``, under the path of the official SDK."""

from tinkex.types import ExternalWeightsUrlsResponse

__all__ = ["ExternalWeightsUrlsResponse"]
