"""``tinkex auth``: the API key stored on this machine, and its owner."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.groups import CommandGroup
from tinkex.cli.invocation import INTERACTIVE_RETRIES, Invocation, pass_invocation
from tinkex.errors import APIStatusError, ConfigError, SetupError, TinkexError

if TYPE_CHECKING:
    from tinkex._transport.caller import Caller

CONSOLE_KEYS = "https://tinker.thinkingmachines.ai/keys"


@click.group(cls=CommandGroup)
def auth() -> None:
    """Log in, log out and show the owner of the key."""


@auth.command()
@click.option(
    "--with-key", metavar="KEY", help="Key to store; '-' reads it from stdin. Default: prompt for it."
)
@pass_invocation
def login(invocation: Invocation, with_key: str | None) -> None:
    """Store an API key on this machine. The server checks it first, and every Tinker program uses it.

    The key is written to ~/.tinker/credentials.json, which only you can read.

    \b
    Examples:
      tinkex auth login
      tinkex auth login --base-url http://127.0.0.1:8787 --with-key - < ~/.tinkex/engine/api_key
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex.config.credentials import Credentials, StoredKey

    stored = Credentials.load()
    if stored.default is not None:
        raise SetupError("already logged in; log out first with: tinkex auth logout")
    if with_key is None:
        invocation.status(f"Create an API key at {CONSOLE_KEYS}, or take the one that 'tinkex serve' prints.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without a terminal nothing is echoed
            with_key = click.prompt("Paste your API key", hide_input=True, err=True)
    elif with_key == "-":
        with_key = sys.stdin.readline()
    key = str(with_key).strip()
    if not key:
        raise click.UsageError("the key is empty")
    found = _own_key(invocation, key, "GET")
    key_id, name = str(found.get("key_id", "default")), str(found.get("name") or "unnamed")
    stored.add(
        key_id, StoredKey(key, name, "manual", found.get("note") or None, found.get("details") or None)
    )
    stored.save()
    details = found.get("details") or {}
    email = (details.get("user_details") or {}).get("email") or "no e-mail address"
    organization = (details.get("org_details") or {}).get("name") or "unknown organization"
    invocation.result(
        f"Logged in as {email} ({organization}). The key {name!r} is stored in {stored.file}.",
        {"key_id": key_id, "name": name, "email": email, "organization": organization},
    )


@auth.command()
@pass_invocation
def logout(invocation: Invocation) -> None:
    """Remove the stored key. A key generated for this machine is also revoked on the server.

    \b
    Examples:
      tinkex auth logout
      tinkex auth logout --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex.config.credentials import Credentials

    stored = Credentials.load()
    key = stored.default_key
    if key is None:
        raise SetupError("no key is stored; log in with: tinkex auth login")
    failure: TinkexError | None = None
    if key.type == "generated":
        try:
            _own_key(invocation, key.key, "DELETE")
        except TinkexError as error:
            failure = error
    stored.remove_default()
    stored.save()
    if failure is not None:
        raise SetupError(
            f"the key {key.name!r} is removed from this machine, but the server did not revoke it: {failure} "
            "Revoke it in the server's console."
        )
    remark = "revoked on the server" if key.type == "generated" else "still valid elsewhere"
    invocation.result(
        f"Removed the key {key.name!r}; it is {remark}.",
        {"name": key.name, "revoked": key.type == "generated"},
    )


@auth.command()
@pass_invocation
def status(invocation: Invocation) -> None:
    """Check that a key exists and that the server accepts it. Exit code 1 if not.

    \b
    Examples:
      tinkex auth status
      tinkex auth status --base-url http://127.0.0.1:8787 --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    problem: TinkexError | None = None
    available = accessible = False
    try:
        rest = invocation.rest()
        available = True
        rest.list_training_runs(limit=1).result()
        accessible = True
    except (ConfigError, SetupError, APIStatusError) as error:
        problem = error
    except TinkexError as error:
        problem = error
    if invocation.as_json:
        invocation.json({"credentials_available": available, "accessible": accessible})
    else:
        click.echo(f"Credentials available: {'yes' if available else 'no'}")
        if available:
            click.echo(f"Tinker accessible: {'yes' if accessible else 'no'}")
    if problem is not None:
        raise problem


@auth.command()
@pass_invocation
def whoami(invocation: Invocation) -> None:
    """Show the owner of the key.

    \b
    Examples:
      tinkex auth whoami
      tinkex auth whoami --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex.cli.render import or_missing

    if invocation.config().is_local:
        raise SetupError(
            "the engine in this process has one user and needs no key; give a server with --base-url"
        )
    try:
        identity = invocation.rest().whoami().result()
    except RuntimeError as error:
        if isinstance(error, TinkexError):
            raise
        raise SetupError(str(error)) from error
    rows = [
        ("Email", or_missing(identity.email)),
        ("User", identity.user_urn),
        ("Organization", identity.org_urn),
    ]
    invocation.properties(identity.model_dump(mode="json"), rows)


def _own_key(invocation: Invocation, key: str, method: str) -> dict[str, Any]:
    """Returns the server's record of a key (``GET``) or revokes it (``DELETE``); the key is its own credential."""
    import msgspec

    from tinkex._runtime import background
    from tinkex._wire.endpoints import endpoint
    from tinkex.clients._connection import connect

    config = replace(invocation, api_key=key).config(max_retries=INTERACTIVE_RETRIES)
    if config.is_local:
        raise SetupError("the engine in this process needs no key; give a server with --base-url")
    caller: Caller = connect(config=config, transport=None, events=None)

    async def call() -> bytes:
        try:
            name = "get_own_key" if method == "GET" else "delete_own_key"
            return (await caller.exchange(endpoint(name))).body
        finally:
            await caller.close()

    body = background().run(call())
    return msgspec.json.decode(body, type=dict[str, Any]) if body else {}
