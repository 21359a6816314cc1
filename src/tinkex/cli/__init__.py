"""The ``tinkex`` command: one module per command group, imported on first use."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence

import click

from tinkex._version import __version__
from tinkex.cli.groups import EXIT_CODES, LazyGroup, common_options
from tinkex.cli.invocation import Invocation

__all__ = ["COMMANDS", "main", "run", "tinkex"]

COMMANDS: Mapping[str, str] = {
    name: f"tinkex.cli.{location}"
    for name, location in (
        ("serve", "serve:serve"),
        ("dashboard", "dashboard:dashboard"),
        ("train", "train:train"),
        ("sample", "sample:sample"),
        ("chat", "chat:chat"),
        ("eval", "eval:evaluate"),
        ("model", "model:model"),
        ("run", "runs:run"),
        ("checkpoint", "checkpoint:checkpoint"),
        ("session", "session:session"),
        ("auth", "auth:auth"),
        ("keys", "keys:keys"),
        ("billing", "billing:billing"),
        ("doctor", "doctor:doctor"),
        ("completion", "completion:completion"),
        ("version", "version:version"),
    )
}
"""Command → ``module:attribute``."""


@click.group(
    cls=LazyGroup,
    locations=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)
@click.version_option(__version__, prog_name="tinkex", message="%(prog)s %(version)s")
def tinkex() -> None:
    """Train and sample language models with the Tinker API, on this machine or on a server.

    \b
    Examples:
      tinkex serve
      tinkex train sft examples/data/captains_log.jsonl --local
      tinkex sample "What is the capital of France?" --local
      tinkex checkpoint list --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"


tinkex.params += common_options()


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; ``arguments`` default to those of the process.

    Prints errors on stderr and returns 1; returns 2 for a usage error and 130 after Ctrl-C. Never raises.

    >>> run(["--format", "json", "checkpoint", "delete"])
    2
    """
    invocation = Invocation()
    try:
        tinkex(args=arguments, prog_name="tinkex", standalone_mode=False, obj=invocation)
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 -- every error becomes one line and an exit code
        from tinkex.cli.failures import failure_of

        failure = failure_of(
            error,
            interrupt_hint=invocation.interrupt_hint,
            is_local=invocation.is_local,
            server_options=invocation.server_options,
        )
        failure.show(as_json=invocation.as_json or _wants_json(arguments))
        return failure.exit_code
    finally:
        invocation.restore()
    return 0


def _wants_json(arguments: Sequence[str] | None) -> bool:
    """Whether a command line that failed to parse asks for JSON."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    args = args[: args.index("--")] if "--" in args else args
    return bool({"--json", "-fjson", "--format=json"} & set(args)) or any(
        pair in {("-f", "json"), ("--format", "json")} for pair in itertools.pairwise(args)
    )


def main() -> None:
    """Runs the command line and exits with its exit code."""
    from tinkex.cli.streams import flush_streams, set_up_streams

    set_up_streams()
    try:
        code = run()
    finally:
        flush_streams()
    sys.exit(code)
