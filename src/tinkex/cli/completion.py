"""``tinkex completion``: shell completion scripts."""

from __future__ import annotations

import click

from tinkex.cli.groups import Leaf
from tinkex.cli.invocation import Invocation, pass_invocation

SHELLS = ("bash", "zsh", "fish")


@click.command(cls=Leaf, uses_server=False)
@click.argument("shell", type=click.Choice(SHELLS))
@pass_invocation
@click.pass_context
def completion(ctx: click.Context, invocation: Invocation, shell: str) -> None:
    """Print a shell completion script. It completes commands, options, choices and files.

    \b
    Examples:
      tinkex completion bash >> ~/.bashrc
      tinkex completion zsh >> ~/.zshrc      # below the line with compinit
      tinkex completion fish > ~/.config/fish/completions/tinkex.fish
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click supports every shell in SHELLS"
    root = ctx.find_root().command
    script = kind(root, {}, "tinkex", "_TINKEX_COMPLETE").source()
    if invocation.as_json:
        invocation.json({"shell": shell, "script": script})
    else:
        click.echo(script)
