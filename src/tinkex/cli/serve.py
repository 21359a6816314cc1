"""``tinkex serve``: the engine as a server for any Tinker client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tinkex.cli.groups import HELP_NAMES, common_options
from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.cli.server_settings import METAVARS, SETTINGS, read_settings
from tinkex.errors import SetupError

UNITS = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """A command with one option per setting; an option that is not given leaves the word to environment and file."""
    for name, setting in reversed(list(SETTINGS.items())):
        flag = f"--{name.replace('_', '-')}"
        shown = setting.default if isinstance(setting.default, str | int | float) else None
        suffix = f"  [default: {_shown(shown, setting.kind)}]" if shown is not None else ""
        details: dict[str, Any] = {"default": None, "help": setting.meaning + suffix}
        if setting.kind == "switch":
            # Off by default, and to be switched off against a file that says on.
            option = click.option(
                f"{flag}/--{name.removeprefix('no_').replace('_', '-')}"
                if name.startswith("no_")
                else f"{flag}/--no-{flag[2:]}",
                name,
                **{**details, "help": setting.meaning},
            )
        elif setting.kind == "texts":
            option = click.option(
                "--model", name, multiple=True, metavar="[NAME=]NAME_OR_DIR", **{**details, "default": ()}
            )
        elif setting.choices:
            option = click.option(flag, name, type=click.Choice(setting.choices), **details)
        elif setting.kind == "path":
            option = click.option(flag, name, type=click.Path(path_type=Path), **details)
        else:
            option = click.option(flag, name, metavar=METAVARS[setting.kind], **details)
        command = option(command)
    return command


def _shown(default: object, kind: str) -> str:
    if kind == "bytes" and isinstance(default, int):
        return f"{default >> 20}M"
    if kind == "seconds" and isinstance(default, float):
        unit, length = next(((u, n) for u, n in UNITS if default % n == 0), ("s", 1))
        return f"{default / length:g}{unit}"
    return str(default)


@click.command(context_settings={"help_option_names": HELP_NAMES})
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File (TOML) with settings, named like the options with _ for -. Default: $TINKEX_SERVE_CONFIG.",
)
@_with_settings
@pass_invocation
def serve(invocation: Invocation, /, config: Path | None, **flags: Any) -> None:
    """Serve models to Tinker clients, ours or the official one.

    When everything is loaded, one line on stdout says where, and with which key. Ctrl-C stops the server: the operation
    under way is finished, and checkpoints and results stay for the next start; a second Ctrl-C ends it at once.

    A setting comes from its option, else from the variable TINKEX_SERVE_<NAME>, else from the file of --config, else it has its default.
    BYTES may have a unit (512M, 20G), SECONDS too (90s, 30m, 12h, 7d).

    \b
    Examples:
      tinkex serve
      tinkex serve --model Qwen/Qwen3-8B=./my-model --model ./another --port 9000
      tinkex serve --host 0.0.0.0 --tls-cert chain.pem --tls-key key.pem --max-live-runs-per-user 4

    \b
    Then, with any client:
      TINKER_BASE_URL=http://127.0.0.1:8787 TINKER_API_KEY=<key> python train.py
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    if invocation.base_url is not None or invocation.api_key is not None:
        raise click.UsageError("a server talks to no other one; leave out --base-url, --local and --api-key")
    try:
        read_settings(flags, {})
    except SetupError as error:  # of the options alone, so of what was typed
        raise click.UsageError(str(error)) from error
    settings = read_settings(flags, config_file=config)
    try:
        from tinkex.cli.server import run_server
    except ModuleNotFoundError as error:
        raise SetupError(
            f"tinkex serve needs the engine, and {error.name} is not installed; run: pip install 'tinkex[engine]'"
        ) from error
    run_server(settings, as_json=invocation.as_json, quiet=invocation.quiet or invocation.as_json)


serve.params += [option for option in common_options() if option.name in {"as_json", "quiet"}]
