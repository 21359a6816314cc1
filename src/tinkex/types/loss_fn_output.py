"""``LossFnOutput``, under the path of the official SDK."""

from tinkex.types import LossFnOutput

__all__ = ["LossFnOutput"]
