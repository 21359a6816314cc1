"""``tinkex version``."""

from __future__ import annotations

import click

from tinkex._version import __version__
from tinkex.cli.groups import Leaf
from tinkex.cli.invocation import Invocation, pass_invocation


@click.command(cls=Leaf, uses_server=False)
@click.option("--deps", is_flag=True, help="Also print the versions of the main dependencies.")
@pass_invocation
def version(invocation: Invocation, deps: bool) -> None:
    """Print the version.

    \b
    Examples:
      tinkex version
      tinkex version --deps --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    value: dict[str, object] = {"version": __version__}
    lines = [f"tinkex {__version__}"]
    if deps:
        found = _installed()
        value["dependencies"] = found
        lines += [f"{name} {number or 'not installed'}" for name, number in found.items()]
    if invocation.as_json:
        invocation.json(value)
    else:
        click.echo("\n".join(lines))


def _installed() -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    found: dict[str, str | None] = {}
    for name in ("numpy", "msgspec", "protobuf", "pyqwest", "tokenizers", "torch", "huggingface_hub"):
        try:
            found[name] = version_of(name)
        except PackageNotFoundError:
            found[name] = None
    return found
