"""``tinkex serve``: the engine as a server for any Tinker client."""

from __future__ import annotations

from pathlib import Path

import click

from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.errors import SetupError


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8787, show_default=True, help="Port to listen on; 0 picks a free one.")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="[NAME=]NAME_OR_DIR",
    help="Model to serve: a directory, a .gguf file or a hub name, under its own name or under NAME. "
    "Repeat it for more models or names; one source under several names is loaded once. "
    "Default: $TINKEX_MODELS (comma-separated), or a small instruct model that is fetched at the first start "
    "(about 100 MB).",
)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where checkpoints, results and the key are kept. Default: $TINKEX_DATA_DIR, or $TINKEX_HOME/engine, or "
    "~/.tinkex/engine.",
)
@click.option("--no-auth", is_flag=True, help="Accept every key; only on this machine (127.0.0.1).")
@pass_invocation
def serve(
    invocation: Invocation,
    host: str,
    port: int,
    models: tuple[str, ...],
    data_dir: Path | None,
    no_auth: bool,
) -> None:
    """Serve models to Tinker clients, ours or the official one.

    When everything is loaded, one line on stdout says where, and with which key (as JSON with tinkex --json serve). Ctrl-C stops the server: the operation
    under way is finished, and checkpoints and results stay for the next start.

    \b
    Examples:
      tinkex serve
      tinkex serve --model Qwen/Qwen3-8B=./my-model --model ./another --port 9000

    \b
    Then, with any client:
      TINKER_BASE_URL=http://127.0.0.1:8787 TINKER_API_KEY=<key> python train.py
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    try:
        from tinkex.cli.server import run_server
    except ModuleNotFoundError as error:
        raise SetupError(
            f"tinkex serve needs the engine, and {error.name} is not installed; run: pip install 'tinkex[engine]'"
        ) from error
    if invocation.base_url is not None or invocation.api_key is not None:
        raise click.UsageError("a server talks to no other one; leave out --base-url, --local and --api-key")
    run_server(
        host=host,
        port=port,
        models=models,
        data_dir=data_dir,
        auth=not no_auth,
        as_json=invocation.as_json,
        quiet=invocation.quiet or invocation.as_json,
    )
