"""Every setting of the client: what it accepts, where it is read from, and the keys that a login stores.

>>> from tinkex.config import Config
>>> Config.resolve(api_key="tml-0123456789abcdef", environ={}).timeout
60.0
"""

from __future__ import annotations

from tinkex.config.settings import DEFAULT_BASE_URL, LOCAL, SETTINGS, Config, Setting, mask

__all__ = ["DEFAULT_BASE_URL", "LOCAL", "SETTINGS", "Config", "Setting", "mask"]
