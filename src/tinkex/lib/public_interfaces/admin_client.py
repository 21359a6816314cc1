"""Where official-SDK programs import ``AdminClient`` from."""

from tinkex.clients.admin import AdminClient

__all__ = ["AdminClient"]
