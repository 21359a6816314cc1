"""Chooses the transport of a client from its settings."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tinkex._transport.caller import Caller
from tinkex.config import Config
from tinkex.observability.callbacks import queued

if TYPE_CHECKING:
    from tinkex._transport.base import Transport
    from tinkex.observability.events import Sink

__all__ = ["connect"]


def connect(
    *, config: Config | None, transport: Transport | None, events: Sink | None, **settings: Any
) -> Caller:
    """A caller for these settings: over the given transport, in-process for ``local``, else over HTTP."""
    given = sorted(name for name, value in settings.items() if value is not None)
    if config is not None and given:
        raise TypeError(f"config contains all settings; {given[0]!r} was given as well")
    if config is None:
        config = Config.resolve(needs_key=transport is None, **settings)
    if config.log_level is not None:
        _log_at(config.log_level)
    if transport is None:
        transport = _transport(config)
    return Caller(transport, config, sink=queued(events))


def _log_at(level: str) -> None:
    """Sets the level of the client's logger, which writes to stderr unless the program has set up logging."""
    logger = logging.getLogger("tinkex")
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger.addHandler(handler)


def _transport(config: Config) -> Transport:
    if config.is_local:
        from tinkex._transport.local import LocalTransport

        return LocalTransport()
    from tinkex._transport.shared import SharedHttp

    return SharedHttp(config)
