"""``GetServerCapabilitiesResponse``, ``SupportedModel``, under the path of the official SDK."""

from tinkex.types import GetServerCapabilitiesResponse, SupportedModel

__all__ = ["GetServerCapabilitiesResponse", "SupportedModel"]
