"""``tinkex keys``: API keys in the data directory of a server on this machine; works while the server runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.groups import CommandGroup
from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.cli.streams import confirm
from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tinkex.engine.store import KeyRow
    from tinkex.engine.store.users import Users

OPERATOR = "local"
"""The user of the server's own key."""
DATA_DIR = click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Data directory of the server. Default: that of 'tinkex serve'.",
)


@click.group(cls=CommandGroup)
def keys() -> None:
    """Create, list and revoke API keys of a server on this machine.

    The commands edit the server's data directory. A running server accepts new keys immediately and rejects revoked
    ones within seconds. Users see only their own runs, checkpoints and sessions.
    """


@keys.command(uses_server=False)
@click.argument("user")
@click.option("--name", help="Name of the key. Default: the user's name.")
@click.option(
    "--operator",
    is_flag=True,
    help="Create a further key of the operator, the user 'local', who sees the audit entries of all users and the metrics.",
)
@DATA_DIR
@pass_invocation
def create(
    invocation: Invocation, user: str, name: str | None, operator: bool, data_dir: Path | None
) -> None:
    """Create a key for USER and add a user that does not exist. The key is printed once; only its hash is stored.

    \b
    Examples:
      tinkex keys create ada
      tinkex keys create ada@example.org --name laptop --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    if not user.strip():
        raise click.UsageError("the user's name is empty")
    if (user == OPERATOR) != operator:
        raise click.UsageError(
            f"{OPERATOR} is the operator of the server; add --operator to create another operator key, or choose another name"
            if user == OPERATOR
            else f"--operator creates a key of the user {OPERATOR}; drop it, or give that user"
        )
    with _users(data_dir) as users:
        key, row = users.create_key(user, time.time(), name)
    if invocation.as_json:
        invocation.json({"key": key, **_value(row)})
        return
    invocation.status(f"Key {row.key_id} of {user}; it cannot be shown again:")
    click.echo(key)


@keys.command("list", uses_server=False)
@click.option("--user", help="Only keys of this user.")
@DATA_DIR
@pass_invocation
def list_(invocation: Invocation, user: str | None, data_dir: Path | None) -> None:
    """List keys with owner and creation time.

    \b
    Examples:
      tinkex keys list
      tinkex keys list --user ada --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex.cli.render import relative_time

    with _users(data_dir) as users:
        rows = users.all_keys(user)
    invocation.table(
        {"keys": [_value(row) for row in rows]},
        ["Key ID", "User", "Name", "Created", "Revoked"],
        [
            [
                str(row.key_id),
                row.user_id,
                row.name,
                relative_time(_timestamp(row.created_at)),
                relative_time(_timestamp(row.revoked_at), missing="No"),
            ]
            for row in rows
        ],
    )


@keys.command(uses_server=False)
@click.argument("key_ids", nargs=-1, required=True, type=int)
@click.option("-y", "--yes", is_flag=True, help="Skip the confirmation.")
@DATA_DIR
@pass_invocation
def revoke(invocation: Invocation, key_ids: tuple[int, ...], yes: bool, data_dir: Path | None) -> None:
    """Revoke keys permanently, after confirmation. Get the ids from: tinkex keys list.

    \b
    Examples:
      tinkex keys revoke 3
      tinkex keys revoke 3 4 --yes
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    listed = ", ".join(str(key_id) for key_id in key_ids)
    if not yes and not confirm(f"Revoke {listed} permanently?"):
        invocation.result("Nothing was revoked.", {"revoked": [], "failed": []})
        return
    with _users(data_dir) as users:
        was_active = {key_id: users.revoke(key_id, time.time()) for key_id in dict.fromkeys(key_ids)}
    revoked = [key_id for key_id, active in was_active.items() if active]
    failed = [key_id for key_id, active in was_active.items() if not active]
    invocation.result(
        f"Revoked {len(revoked)} key{'s' if len(revoked) != 1 else ''}.",
        {"revoked": revoked, "failed": failed},
    )
    if failed:
        raise SetupError(f"no active key has the id {', '.join(map(str, failed))}; see: tinkex keys list")


@contextmanager
def _users(data_dir: Path | None) -> Iterator[Users]:
    try:
        from tinkex.engine.config import EngineConfig, data_dir_from_env
        from tinkex.engine.store import open_users
    except ModuleNotFoundError as error:
        raise SetupError(
            f"tinkex keys needs the engine, and {error.name} is not installed; run: pip install 'tinkex[engine]'"
        ) from error
    directory = EngineConfig(data_dir=data_dir or data_dir_from_env()).engine_dir
    with open_users(directory) as users:
        yield users


def _timestamp(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _value(row: KeyRow) -> dict[str, Any]:
    return {
        "key_id": row.key_id,
        "user": row.user_id,
        "name": row.name,
        "created_at": _timestamp(row.created_at),
        "revoked_at": _timestamp(row.revoked_at),
    }
