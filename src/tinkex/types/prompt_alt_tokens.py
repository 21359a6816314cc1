"""``PromptAltTokens``, under the path of the official SDK."""

from tinkex.types import PromptAltTokens

__all__ = ["PromptAltTokens"]
