"""What clients without a session have in common: how they are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.clients._connection import connect
from tinkex.clients._rest_calls import RestCalls

if TYPE_CHECKING:
    from tinkex._transport.base import Transport
    from tinkex._transport.caller import Caller
    from tinkex.clients.session import Session
    from tinkex.config import Config
    from tinkex.observability.events import Sink

__all__ = ["Sessionless"]


class Sessionless:
    """A client over the connections of a holder or caller, or over those to a server and key.

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
    ) -> None:
        if _holder is not None:
            if any(given is not None for given in (base_url, api_key, config, transport, events, caller)):
                raise ValueError(
                    f"{type(self).__name__} takes a holder, which knows its server and key, or settings; not both"
                )
            caller = _holder.caller
        self._caller = caller or connect(
            config=config, transport=transport, events=events, base_url=base_url, api_key=api_key
        )
        self._calls = RestCalls(self._caller)
