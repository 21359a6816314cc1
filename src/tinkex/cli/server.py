"""The server process behind ``tinkex serve``: socket, engine, signals, and one line when it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click
import uvicorn

from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig, chosen_data_dir, chosen_models
from tinkex.engine.core import Engine
from tinkex.errors import SetupError
from tinkex.terminal.loading import LoadingLine

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Clients send a heartbeat every 10 s; their connections must outlive the pauses in between."""
GRACE_S = 10


def run_server(
    *,
    host: str,
    port: int,
    models: Sequence[str],
    data_dir: Path | None,
    auth: bool,
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM; returns when everything is closed."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    from tinkex.engine.model.catalog import parse_model_flag

    served: dict[str, str] = {}
    for flag in models or chosen_models():
        name, source = parse_model_flag(flag)
        if served.setdefault(name, source) != source:
            raise SetupError(
                f"two models are named {name}: {served[name]} and {source}; name one with --model NAME={source}"
            )
    config = EngineConfig(
        host=host, port=port, models=served, data_dir=data_dir or chosen_data_dir(), auth=auth
    )
    line = LoadingLine(sys.stderr)
    with contextlib.closing(listen(host, port)) as listener:
        engine = Engine(config, None if quiet else line.show)
        try:
            engine.start()
            _load(engine)
            line.clear()
            _serve(engine, listener, _ready_line(engine, listener, as_json=as_json))
        finally:
            engine.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, taken before anything slow happens; :class:`SetupError` says why there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SetupError(
            f"cannot listen on {host} port {port}: {error.strerror or error}. "
            "Stop what uses it, choose another with --port, or let --port 0 pick a free one."
        ) from error


def _load(engine: Engine) -> None:
    """Load every model, with progress on stderr; a signal meanwhile ends the process."""
    previous = {number: signal.signal(number, _leave_at_once) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        engine.load_models().result()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _leave_at_once(_number: int, _frame: FrameType | None) -> NoReturn:
    # A download or a half-loaded model cannot be interrupted, and nothing has been promised to anyone yet.
    click.echo("\nStopped before the models were loaded.", err=True)
    sys.stderr.flush()
    os._exit(0)


def _ready_line(engine: Engine, listener: socket.socket, *, as_json: bool) -> str:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    if as_json:
        return json.dumps(
            {
                "url": url,
                "models": list(engine.models.names),
                "api_key": engine.api_key if engine.config.auth else None,
            }
        )
    key = f"key {engine.api_key}" if engine.config.auth else "no key needed"
    return f"tinkex serving {', '.join(engine.models.names)} at {url}  {key}"


def _serve(engine: Engine, listener: socket.socket, ready_line: str) -> None:
    settings = uvicorn.Config(
        build_app(engine),
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
        server_header=False,
    )
    server = _Server(settings, on_ready=lambda: click.echo(ready_line))

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def stop() -> None:
            server.force_exit = server.should_exit
            server.should_exit = True
            engine.end_waits()

        with contextlib.suppress(NotImplementedError):  # Windows has no signal handlers on loops
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop)
        await server.serve(sockets=[listener])

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class _Server(uvicorn.Server):
    """Says when it listens, and leaves signals to us: uvicorn would end the process by the signal it got."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
