"""``TrainingRunsResponse``, under the path of the official SDK."""

from tinkex.types import TrainingRunsResponse

__all__ = ["TrainingRunsResponse"]
