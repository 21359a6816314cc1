"""An engine with one sampling slot and short polls, so that waiting samples report why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tinkex
from tests.contract.backends import Backend
from tests.contract.names import BASE_MODEL
from tests.durability.killable import KillableServer
from tinkex._transport.local import LocalTransport
from tinkex.engine.api import embedded
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine

POLL_S = 0.05


@contextmanager
def limited_embedded(home: Path, model: Path) -> Iterator[Backend]:
    """In this process: the engine that clients of this home are given."""
    models = {BASE_MODEL: str(model)}
    config = EngineConfig(home=home, models=models, auth=False, long_poll_s=POLL_S, max_decode_batch=1)
    engine = Engine(config)
    engine.start()
    place = config.engine_dir.resolve()
    held = embedded.EmbeddedEngine(build_app(engine), engine, place, users=1)
    embedded._engines[place] = held  # noqa: SLF001 - no setting of an embedded engine shortens its polls
    try:
        yield Backend(
            service=lambda **more: tinkex.ServiceClient(
                base_url="local", transport=LocalTransport(home, models), **more
            ),
            rest=lambda **more: tinkex.RestClient(
                base_url="local", transport=LocalTransport(home, models), **more
            ),
        )
    finally:
        held.close()


@contextmanager
def limited_server(home: Path, model: Path) -> Iterator[tuple[Backend, KillableServer]]:
    """The same as a server of its own."""
    options = ("--long-poll-s", str(POLL_S), "--max-decode-batch", "1")
    with KillableServer(home, model, *options) as server:
        where = {"base_url": server.url, "api_key": server.key}
        yield (
            Backend(
                service=lambda **more: tinkex.ServiceClient(**{**where, **more}),
                rest=lambda **more: tinkex.RestClient(**{**where, **more}),
            ),
            server,
        )
        server.stop()
