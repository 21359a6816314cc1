"""``TrainingRun``, under the path of the official SDK."""

from tinkex.types import TrainingRun

__all__ = ["TrainingRun"]
