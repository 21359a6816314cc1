"""The constructor of clients without a session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from tinkex.clients._connection import connect
from tinkex.clients._docstrings import documented
from tinkex.clients._rest_calls import RestCalls
from tinkex.clients._warnings import warn_about_deprecated_names

if TYPE_CHECKING:
    from tinkex._transport.base import Transport
    from tinkex._transport.caller import Caller
    from tinkex.clients.session import Session
    from tinkex.config import Config, ConfigOptions
    from tinkex.observability.events import Sink

__all__ = ["SessionlessClient"]


@documented("rest")
class SessionlessClient:
    """A client that uses the connections of a holder or caller, or those of a server and key.

    Clients of the same server and key share their connections.
    """

    def __init__(
        self,
        _holder: Session | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        config: Config | None = None,
        transport: Transport | None = None,
        events: Sink | None = None,
        caller: Caller | None = None,
        **settings: Unpack[ConfigOptions],
    ) -> None:
        if _holder is not None:
            given = (base_url, api_key, config, transport, events, caller, *settings.values())
            if any(value is not None for value in given):
                raise ValueError(
                    f"{type(self).__name__} takes a holder, which has a server and key, or settings; not both"
                )
            caller = _holder.caller
        self._caller = caller or connect(
            config=config, transport=transport, events=events, base_url=base_url, api_key=api_key, **settings
        )
        self._calls = RestCalls(self._caller)
        warn_about_deprecated_names(self, self.config)

    @property
    def config(self) -> Config:
        """The settings of this client; its ``repr`` shows no secrets."""
        return self._caller.config
