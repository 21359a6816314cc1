"""Where official-SDK programs import ``ServiceClient`` from."""

from tinkex.clients.service import ServiceClient

__all__ = ["ServiceClient"]
