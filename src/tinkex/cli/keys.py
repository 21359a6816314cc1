"""``tinkex keys``: who may use the server of a data directory on this machine; works while the server runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.groups import Noun
from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.cli.streams import confirmed
from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tinkex.engine.store import KeyRow
    from tinkex.engine.store.users import Users

DATA_DIR = click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Data directory of the server. Default: as for tinkex serve.",
)


@click.group(cls=Noun)
def keys() -> None:
    """Make, list and revoke API keys of a server here.

    They work on the data directory of a server on this machine. A running server takes new keys at once, and refuses
    revoked ones within seconds. Every user sees only what is theirs.
    """


@keys.command()
@click.argument("user")
@click.option("--name", help="What the key is called. Default: the user's name.")
@DATA_DIR
@pass_invocation
def create(invocation: Invocation, user: str, name: str | None, data_dir: Path | None) -> None:
    """Make a key for USER, who is added if new. The key is printed once; only a hash of it is kept.

    \b
    Examples:
      tinkex keys create ada
      tinkex keys create ada@example.org --name laptop --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    if not user.strip():
        raise click.UsageError("the user's name is empty")
    with _users(data_dir) as users:
        key, row = users.create_key(user, time.time(), name)
    if invocation.as_json:
        invocation.json({"key": key, **_value(row)})
        return
    invocation.remark(f"Key {row.key_id} of {user}; it is shown this once:")
    click.echo(key)


@keys.command("list")
@click.option("--user", help="Only keys of this user.")
@DATA_DIR
@pass_invocation
def list_(invocation: Invocation, user: str | None, data_dir: Path | None) -> None:
    """List keys: whose they are, and since when.

    \b
    Example:
      tinkex keys list
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex.cli.render import moment

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
                moment(_when(row.created_at)),
                moment(_when(row.revoked_at), missing="No"),
            ]
            for row in rows
        ],
    )


@keys.command()
@click.argument("key_ids", nargs=-1, required=True, type=int)
@click.option("-y", "--yes", is_flag=True, help="Do not ask first.")
@DATA_DIR
@pass_invocation
def revoke(invocation: Invocation, key_ids: tuple[int, ...], yes: bool, data_dir: Path | None) -> None:
    """End keys for good; asks first. Their ids are those that 'tinkex keys list' shows.

    \b
    Example:
      tinkex keys revoke 3
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    shown = ", ".join(str(key_id) for key_id in key_ids)
    if not yes and not confirmed(f"Revoke {shown} for good?"):
        invocation.result("Nothing was revoked.", {"revoked": [], "failed": []})
        return
    with _users(data_dir) as users:
        ended = {key_id: users.revoke(key_id, time.time()) for key_id in dict.fromkeys(key_ids)}
    revoked = [key_id for key_id, was_live in ended.items() if was_live]
    failed = [key_id for key_id, was_live in ended.items() if not was_live]
    invocation.result(
        f"Revoked {len(revoked)} key{'s' if len(revoked) != 1 else ''}.",
        {"revoked": revoked, "failed": failed},
    )
    if failed:
        raise SetupError(f"no key in force has the id {', '.join(map(str, failed))}; see: tinkex keys list")


@contextmanager
def _users(data_dir: Path | None) -> Iterator[Users]:
    try:
        from tinkex.engine.config import EngineConfig, data_dir_from_env
        from tinkex.engine.store import open_users
    except ModuleNotFoundError as error:
        raise SetupError(
            f"keys are the engine's, and {error.name} is not installed; run: pip install 'tinkex[engine]'"
        ) from error
    directory = EngineConfig(data_dir=data_dir or data_dir_from_env()).engine_dir
    with open_users(directory) as users:
        yield users


def _when(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _value(row: KeyRow) -> dict[str, Any]:
    return {
        "key_id": row.key_id,
        "user": row.user_id,
        "name": row.name,
        "created_at": _when(row.created_at),
        "revoked_at": _when(row.revoked_at),
    }
