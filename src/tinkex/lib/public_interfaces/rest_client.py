"""Where official-SDK programs import ``RestClient`` from."""

from tinkex.clients.rest import RestClient

__all__ = ["RestClient"]
