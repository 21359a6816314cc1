"""The headers of every request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex._version import __version__

if TYPE_CHECKING:
    from tinkex.config import Config

__all__ = [
    "EVENT_STREAM",
    "JSON",
    "PROTOBUF",
    "PROTOCOL_VERSION",
    "RETRY_COUNT",
    "USER_AGENT",
    "common_headers",
]

PROTOCOL_VERSION = "0.36.0"
"""The version of the official client whose protocol this client implements; servers adapt their replies to it."""
USER_AGENT = f"Tinkex/Python {__version__}"

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
EVENT_STREAM = "text/event-stream"
RETRY_COUNT = "x-stainless-retry-count"


def common_headers(config: Config) -> dict[str, str]:
    """The headers that do not depend on the call.

    >>> from tinkex.config import Config
    >>> common_headers(Config(api_key="tml-0123"))["x-api-key"]
    'tml-0123'
    """
    headers = {
        "accept": JSON,
        "user-agent": USER_AGENT,
        "x-stainless-package-version": PROTOCOL_VERSION,
        RETRY_COUNT: "0",
    }
    if config.api_key:
        headers["x-api-key"] = config.api_key
    if config.cloudflare_client_id:
        headers["cf-access-client-id"] = config.cloudflare_client_id
    if config.cloudflare_client_secret:
        headers["cf-access-client-secret"] = config.cloudflare_client_secret
    headers.update({name.lower(): value for name, value in config.default_headers.items()})
    return headers
