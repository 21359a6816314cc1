"""``AdamParams``, ``OptimStepRequest``, under the path of the official SDK."""

from tinkex.types import AdamParams, OptimStepRequest

__all__ = ["AdamParams", "OptimStepRequest"]
