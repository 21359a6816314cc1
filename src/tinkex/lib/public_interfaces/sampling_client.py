"""Where official-SDK programs import ``SamplingClient`` from."""

from tinkex.clients.sampling import SamplingClient

__all__ = ["SamplingClient"]
