"""The dashboard of a data directory without its engine: read-only, also while another program holds it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from tinkex.engine.api.dashboard.routes import dashboard_routes
from tinkex.engine.api.dashboard.site import Dashboard
from tinkex.engine.api.origins import NoForeignPages
from tinkex.engine.store import Reader
from tinkex.engine.store.migrations import MIGRATIONS
from tinkex.errors import SetupError


def build_local_app(reader: Reader, models_home: Path | None = None) -> ASGIApp:
    """Returns the application; raises ``SetupError`` for the files of another version.

    Tokens of rollouts are shown as text if their model is on this machine, also in ``models_home``.

    Example:
        >>> with open_reader(data_dir) as reader:
        ...     uvicorn.run(build_local_app(reader), host="127.0.0.1", port=8788)
    """
    row = reader.one("PRAGMA user_version")
    version = int(row[0]) if row is not None else 0
    if version != len(MIGRATIONS):
        raise SetupError(
            f"the data directory was written by another version of tinkex (schema {version}, this one has {len(MIGRATIONS)}); "
            "use it once with this version, or this command of that version."
        )
    return NoForeignPages(Starlette(routes=dashboard_routes(Dashboard(reader, models_home=models_home))))


def serve_local(app: ASGIApp, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serves on a socket until SIGINT or SIGTERM; calls ``on_ready`` when it handles them."""
    server = _UnsignalledServer(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=1,  # event streams have no end of their own
        )
    )

    def stop() -> None:
        server.should_exit = True

    async def run() -> None:
        with contextlib.suppress(NotImplementedError):  # Windows has no signal handlers on loops
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, stop)
        on_ready()
        await server.serve(sockets=[listener])

    asyncio.run(run())


class _UnsignalledServer(uvicorn.Server):
    """Does not handle signals: uvicorn would raise the captured one again at its end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing."""
        yield
