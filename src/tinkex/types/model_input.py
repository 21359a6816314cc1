"""``ModelInput``, under the path of the official SDK."""

from tinkex.types import ModelInput

__all__ = ["ModelInput"]
