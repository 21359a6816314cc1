"""The server process of ``tinkex serve``: socket, engine, signals, and one line when it is ready."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import click
import uvicorn

from tinkex.cli.server_connections import (
    AcceptedConnection,
    Connections,
    accept,
    parse_proxies,
    raise_descriptor_limit,
)
from tinkex.cli.server_logs import set_up_logs
from tinkex.cli.server_protocol import BoundedHttpProtocol
from tinkex.cli.server_settings import SETTINGS
from tinkex.cli.server_tracing import set_up_tracing
from tinkex.engine.api.app import build_app
from tinkex.engine.config import LOOPBACK_HOSTS, EngineConfig
from tinkex.engine.engine import Engine
from tinkex.errors import SetupError
from tinkex.observability.terminal.loading import LoadingLine

logger = logging.getLogger("tinkex.server")

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Clients send a heartbeat every 10 s; their connections must stay open in between."""
GRACE_S = 10
"""How long responses in flight may take at shutdown; long polls are answered immediately."""
GC_THRESHOLD = 10_000
"""How many new objects start a search for garbage: with many clients the default searches several times per request."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_server(settings: Mapping[str, Any], *, as_json: bool = False, quiet: bool = False) -> None:
    """Serves until SIGINT or SIGTERM; returns when everything is closed."""
    set_up_logs(settings["log_format"], settings["log_level"], access=settings["access_log"])
    config = engine_config(settings)
    check_exposure(config, settings)
    connections = Connections.within_limits(
        raise_descriptor_limit(),
        settings["max_connections"],
        settings["max_connections_per_address"],
        parse_proxies(settings["behind_proxy"]),
    )
    line = LoadingLine(sys.stderr)
    with set_up_tracing(), contextlib.closing(listen(config.host, config.port)) as listener:
        engine = Engine(config, None if quiet else line.show)
        try:
            engine.start()
            _serve(engine, listener, connections, settings, line, as_json=as_json)
        finally:
            _close(engine, settings["shutdown_after_s"])


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Returns the engine's configuration; settings that are not set keep the engine's defaults.

    Example:
        >>> engine_config(read_settings({"no_auth": True})).auth
        False
    """
    values = {
        name: settings[name]
        for name, setting in SETTINGS.items()
        if setting.engine and settings[name] is not None
    }
    if settings["ray"] is not None:
        values |= {"worker": "ray", "ray_address": settings["ray"]}
    else:
        for name in ("trainer_resources", "sampler_resources"):
            if settings[name]:
                raise SetupError(
                    f"{name} is {settings[name]!r}, and only workers on a Ray cluster reserve resources; add --ray, or remove it."
                )
    return EngineConfig(models=_served(settings["models"]), auth=not settings["no_auth"], **values)


def _served(flags: Sequence[str]) -> Mapping[str, str]:
    from tinkex.engine.model.catalog import parse_model_flag

    served: dict[str, str] = {}
    for flag in flags:
        name, source = parse_model_flag(flag)
        if served.setdefault(name, source) != source:
            raise SetupError(
                f"two models have the name {name}: {served[name]} and {source}; rename one with --model NAME={source}"
            )
    return served


def check_exposure(config: EngineConfig, settings: Mapping[str, Any]) -> None:
    """Raises :class:`SetupError` if other machines can reach the server without TLS and no setting allows that."""
    certificate, key = settings["tls_cert"], settings["tls_key"]
    if (certificate is None) != (key is None):
        given, missing = ("tls_cert", "tls_key") if key is None else ("tls_key", "tls_cert")
        raise SetupError(
            f"{given} is set but {missing} is not; TLS needs both --tls-cert and --tls-key (PEM files)."
        )
    if certificate is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        except OSError as error:  # ssl.SSLError is one
            raise SetupError(
                f"cannot load the certificate {certificate} with the key {key}: {error}; give a matching pair of PEM files."
            ) from error
    elif config.host not in LOOPBACK_HOSTS and not (settings["insecure"] or settings["behind_proxy"]):
        raise SetupError(
            f"host {config.host} is reachable from other machines, and without TLS keys and data are sent unencrypted; "
            "give --tls-cert and --tls-key, or --behind-proxy ADDRESS if a proxy terminates TLS, or --insecure."
        )


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket, bound before the slow part of the start; raises :class:`SetupError` on failure."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SetupError(
            f"cannot listen on {host} port {port}: {error.strerror or error}. "
            "Stop the process that uses it, choose another port with --port, or a free one with --port 0."
        ) from error


def _ready_line(engine: Engine, listener: socket.socket, scheme: str, *, as_json: bool) -> str:
    host, port = listener.getsockname()[:2]
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
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


def _serve(
    engine: Engine,
    listener: socket.socket,
    connections: Connections,
    settings: Mapping[str, Any],
    line: LoadingLine,
    *,
    as_json: bool,
) -> None:
    """Serves while the models load, so that health checks are answered; prints the ready line after loading."""
    certificate = settings["tls_cert"]
    protocol = BoundedHttpProtocol.with_stall_timeout(engine.config.request_stall_s)
    server = _Server(
        uvicorn.Config(
            build_app(engine, dashboard=settings["dashboard"]),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            http=protocol,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
            server_header=False,
            proxy_headers=settings["behind_proxy"] is not None,
            forwarded_allow_ips=settings["behind_proxy"],
            ssl_certfile=certificate,
            ssl_keyfile=settings["tls_key"],
        ),
        connections,
        protocol,
    )
    # What exists now stays, so it need not be searched for garbage again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    ready_line = _ready_line(engine, listener, "https" if certificate else "http", as_json=as_json)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loading = asyncio.wrap_future(engine.load_models())

        def stop(number: signal.Signals) -> None:
            if not loading.done():
                # A download or a load cannot be interrupted; accepted operations are in the journal.
                _exit_now("\nStopped before the models were loaded.", 0)
            if server.should_exit:
                _exit_now(
                    "\nStopped immediately; unfinished operations will run at the next start.", 128 + number
                )
            server.should_exit = True
            engine.end_waits()

        with contextlib.suppress(NotImplementedError):  # Windows has no signal handlers on loops
            for number in SIGNALS:
                loop.add_signal_handler(number, stop, number)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await asyncio.wait([loading, serving], return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and loading.exception() is None:
            line.clear()
            click.echo(ready_line)
        else:
            server.should_exit = server.force_exit = True
            engine.end_waits()
        await serving
        _hold_signals()
        await loading

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run())


def _close(engine: Engine, timeout_s: float) -> None:
    """Closes the engine; an operation that takes longer than the timeout runs at the next start."""

    def second_signal(number: int, _frame: FrameType | None) -> NoReturn:
        _exit_now("\nStopped immediately; unfinished operations will run at the next start.", 128 + number)

    for number in SIGNALS:
        signal.signal(number, second_signal)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        concurrent.futures.ThreadPoolExecutor(1).submit(engine.close).result(timeout_s)
    except TimeoutError:
        _exit_now(
            f"The running operation took longer than {timeout_s:g} s; it will run at the next start.", 0
        )


def _hold_signals() -> None:
    """Keeps signals pending until :func:`_close` handles them: the handlers of the event loop end with it."""
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _exit_now(message: str, code: int) -> NoReturn:
    click.echo(message, err=True)
    sys.stderr.flush()
    os._exit(code)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class _Server(uvicorn.Server):
    """Accepts connections within limits, and does not handle signals: uvicorn would raise the captured one again at its end."""

    def __init__(
        self, config: uvicorn.Config, connections: Connections, protocol: type[BoundedHttpProtocol]
    ) -> None:
        super().__init__(config)
        self._connections = connections
        self._protocol = protocol
        self._accepting: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections."""
        await super().startup(sockets=[])
        for listener in sockets or []:
            accepting = accept(
                listener, self._connections, self._new_protocol, self.config.ssl, self._protocol.stall_s
            )
            self._accepting.append(asyncio.create_task(accepting))

    def _new_protocol(self, connection: AcceptedConnection) -> BoundedHttpProtocol:
        protocol = self._protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        protocol.connection = connection
        return protocol

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting connections and waits for responses in flight."""
        for accepting in self._accepting:
            accepting.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing."""
        yield
