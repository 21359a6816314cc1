"""``TensorData``, under the path of the official SDK."""

from tinkex.types import TensorData

__all__ = ["TensorData"]
