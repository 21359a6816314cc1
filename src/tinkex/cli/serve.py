"""``tinkex serve``: run the engine as a server for Tinker clients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tinkex.cli.groups import HELP_NAMES, common_options
from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.cli.server_settings import METAVARS, SETTINGS, flag_of, read_settings
from tinkex.errors import SetupError

LIST_METAVARS = {"models": "[NAME=]NAME_OR_DIR", "allow_origins": "ORIGIN"}
IMPLIED = {"ray": "local"}
"""The values of options that are given without one."""
UNITS = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Adds one option per setting; an option that is not given falls back to the environment and the file."""
    for name, setting in reversed(list(SETTINGS.items())):
        flag = flag_of(name)
        default = setting.default if isinstance(setting.default, str | int | float) else None
        suffix = f"  [default: {_format_default(default, setting.kind)}]" if default not in {None, ""} else ""
        details: dict[str, Any] = {"default": None, "help": setting.meaning + suffix}
        if setting.kind == "boolean":
            # The negative form overrides a configuration file that enables the setting.
            option = click.option(
                f"{flag}/--{name.removeprefix('no_').replace('_', '-')}"
                if name.startswith("no_")
                else f"{flag}/--no-{flag[2:]}",
                name,
                **{**details, "help": setting.meaning},
            )
        elif setting.kind == "list":
            option = click.option(
                flag, name, multiple=True, metavar=LIST_METAVARS[name], **{**details, "default": ()}
            )
        elif setting.choices:
            option = click.option(flag, name, type=click.Choice(setting.choices), **details)
        elif setting.kind == "path":
            option = click.option(flag, name, type=click.Path(path_type=Path), **details)
        else:
            if name in IMPLIED:
                details |= {"is_flag": False, "flag_value": IMPLIED[name]}
            option = click.option(flag, name, metavar=METAVARS[setting.kind], **details)
        command = option(command)
    return command


def _format_default(default: object, kind: str) -> str:
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
    help="TOML file with settings; keys are option names with _ for -. Default: $TINKEX_SERVE_CONFIG.",
)
@_with_settings
@pass_invocation
def serve(invocation: Invocation, /, config: Path | None, **flags: Any) -> None:
    """Serve models to Tinker clients, including the official one.

    Prints one line with the URL and the API key on stdout when all models are loaded. Ctrl-C shuts the server down
    after the running operation; checkpoints and results persist. A second Ctrl-C exits immediately.

    Precedence, highest first: option, environment variable TINKEX_SERVE_<NAME>, --config file, default.
    BYTES accepts units (512M, 20G), and so does SECONDS (90s, 30m, 12h, 7d).

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
        raise click.UsageError("serve does not connect to a server; remove --base-url, --local and --api-key")
    try:
        read_settings(flags, {})
    except SetupError as error:  # only options were read, so this is a usage error
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
