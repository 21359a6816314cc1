"""``TensorDtype``, under the path of the official SDK."""

from tinkex.types import TensorDtype

__all__ = ["TensorDtype"]
