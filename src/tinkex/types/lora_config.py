"""``LoraConfig``, under the path of the official SDK."""

from tinkex.types import LoraConfig

__all__ = ["LoraConfig"]
