"""The client's settings: accepted values, sources, and the keys that a login stores.

>>> from tinkex.config import Config
>>> Config.resolve(api_key="tml-0123456789abcdef", environ={}).timeout
60.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.config.settings import (
    DEFAULT_BASE_URL,
    LOCAL,
    SETTINGS,
    ClientSetting,
    Config,
    ConfigOptions,
    mask,
)

__all__ = ["DEFAULT_BASE_URL", "LOCAL", "SETTINGS", "ClientSetting", "Config", "ConfigOptions", "mask"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Loads a name of 0.1, with a ``DeprecationWarning``."""
        if name.startswith("__"):  # the import system looks up __path__
            raise AttributeError(name)
        from tinkex._moved import load_renamed

        return load_renamed(__name__, name)
