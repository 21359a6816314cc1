"""Where official-SDK programs import ``TrainingClient`` from."""

from tinkex.clients.training import TrainingClient

__all__ = ["TrainingClient"]
