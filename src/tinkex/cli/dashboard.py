"""``tinkex dashboard``: the pages of a server, or of the embedded engine's data directory."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import click

from tinkex.cli.groups import Leaf
from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.errors import SetupError

HOST = "127.0.0.1"


@click.command(cls=Leaf)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8788,
    show_default=True,
    help="With --local: port to listen on; 0 picks a free one.",
)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --local: data directory. Default: that of the embedded engine.",
)
@pass_invocation
def dashboard(invocation: Invocation, port: int, data_dir: Path | None) -> None:
    """Show runs, curves and checkpoints in a browser.

    With --local, serves the pages of the embedded engine's data directory until Ctrl-C, also while a program uses it. Its
    files are opened read-only. Without --local, prints the address of the server's own dashboard, where you sign in with
    your API key.

    \b
    Examples:
      tinkex dashboard --local
      tinkex dashboard --base-url http://127.0.0.1:8787
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    if not invocation.is_local:
        url = (invocation.base_url or os.environ.get("TINKER_BASE_URL", "")).strip()
        if not url:
            raise click.UsageError("give --local, or the URL of a server with --base-url or TINKER_BASE_URL")
        address = f"{url.rstrip('/')}/"
        if invocation.as_json:
            invocation.json({"url": address})
        else:
            click.echo(address)
        return
    _serve(invocation, port, data_dir)


def _serve(invocation: Invocation, port: int, data_dir: Path | None) -> None:
    try:
        from tinkex.engine.api.dashboard.local import build_local_app, serve_local
        from tinkex.engine.config import EngineConfig, data_dir_from_env
        from tinkex.engine.store import open_reader
    except ModuleNotFoundError as error:
        raise SetupError(
            f"tinkex dashboard --local needs the engine, and {error.name} is not installed; run: pip install 'tinkex[engine]'"
        ) from error
    config = EngineConfig(data_dir=data_dir or data_dir_from_env())
    directory = config.engine_dir
    with open_reader(directory) as reader:
        app = build_local_app(reader, config.models_home)
        try:
            listener = socket.create_server((HOST, port))
        except OSError as error:
            raise SetupError(
                f"cannot listen on port {port}: {error.strerror or error}; choose another with --port, or a free one with --port 0."
            ) from error
        with listener:
            address = f"http://{HOST}:{listener.getsockname()[1]}/"

            def show_address() -> None:
                shown = f"dashboard of {directory} at {address}"
                click.echo(json.dumps({"url": address}) if invocation.as_json else shown)

            serve_local(app, listener, show_address)
