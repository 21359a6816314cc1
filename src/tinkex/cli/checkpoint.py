"""``tinkex checkpoint``: saved weights on a server. Commands that transfer weights are in ``checkpoint_files``."""

from __future__ import annotations

from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.checkpoint_files import (
    download,
    merge,
    push_hf,
    save,
    upload,
)
from tinkex.cli.failures import failure_of
from tinkex.cli.groups import CommandGroup
from tinkex.cli.invocation import Invocation, experimental_calls, pass_invocation
from tinkex.cli.paging import check_range, fetch_items
from tinkex.cli.paths import CheckpointPath, RunId, Timestamp
from tinkex.cli.streams import confirm
from tinkex.errors import SetupError, TinkexError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinkex.clients.rest import RestClient
    from tinkex.types import Checkpoint, CheckpointType

PAGE_SIZE = 1000
MAX_SEARCH_PAGE = 200
MAX_PARALLEL_DELETES = 32
TYPES: Mapping[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
    "training": "training",
    "sampler": "sampler",
    "external": "external",
}


@click.group(cls=CommandGroup)
def checkpoint() -> None:
    """List, save, transfer, publish and delete checkpoints."""


@checkpoint.command("list")
@click.option(
    "--run-id", type=RunId(), help="List all checkpoints of this run; --limit and --offset do not apply."
)
@click.option("--limit", default=20, show_default=True, help="Maximum number of checkpoints; 0 lists all.")
@click.option("--offset", default=0, show_default=True, help="Number of checkpoints to skip.")
@pass_invocation
def list_(invocation: Invocation, run_id: str | None, limit: int, offset: int) -> None:
    """List checkpoints.

    \b
    Examples:
      tinkex checkpoint list --local
      tinkex checkpoint list --run-id 0a1b2c:train:0 --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    check_range(limit, offset)
    rest = invocation.rest()
    total: int | None
    if run_id is not None:
        found = list(rest.list_checkpoints(run_id).result().checkpoints)
        total = len(found)
    else:
        found, total = fetch_items(
            lambda wanted, start: rest.list_user_checkpoints(wanted, start).result(),
            lambda page: page.checkpoints,
            limit=limit,
            offset=offset,
            page_size=PAGE_SIZE,
        )
    title = f"{len(found)} checkpoint{'s' if len(found) != 1 else ''}"
    title += f" of run {run_id}" if run_id is not None else ""
    if total is not None and total > offset + len(found):
        title += f" ({total - offset - len(found)} more; --limit 0 shows all)"
    value: dict[str, Any] = {} if run_id is None else {"run_id": run_id}
    value["checkpoints"] = [one.model_dump(mode="json") for one in found]
    if total is not None:
        value |= {"total": total, "shown": len(found)}
    _show(invocation, found, value, title)


def _show(invocation: Invocation, found: Sequence[Checkpoint], value: dict[str, Any], title: str) -> None:
    from tinkex.cli.render import or_missing, relative_time, size, yes_no

    invocation.table(
        value,
        ["Checkpoint ID", "Type", "Base Model", "Size", "Public", "Created", "Expires", "Path"],
        [
            [
                one.checkpoint_id,
                one.checkpoint_type,
                or_missing(one.base_model),
                size(one.size_bytes),
                yes_no(one.public),
                relative_time(one.time),
                relative_time(one.expires_at, missing="Never"),
                one.tinker_path,
            ]
            for one in found
        ],
        title,
    )


@checkpoint.command()
@click.option(
    "--project", "projects", multiple=True, metavar="ID", help="Filter: in this project; repeatable."
)
@click.option(
    "--base-model",
    "base_models",
    multiple=True,
    metavar="NAME",
    help="Filter: of this base model; repeatable.",
)
@click.option("--type", "kind", type=click.Choice(list(TYPES)), help="Filter: only this type.")
@click.option(
    "--metadata",
    multiple=True,
    metavar="NAME=VALUE",
    help="Filter: with this user metadata; repeatable, all must match.",
)
@click.option(
    "--owner",
    "owners",
    multiple=True,
    metavar="USER",
    help="Of this user instead of your own, as far as they are public; repeatable.",
)
@click.option("--accessible", is_flag=True, help="Your own and all public ones.")
@click.option("--limit", default=20, show_default=True, help="Maximum number of checkpoints; 0 returns all.")
@pass_invocation
def search(
    invocation: Invocation,
    projects: tuple[str, ...],
    base_models: tuple[str, ...],
    kind: str | None,
    metadata: tuple[str, ...],
    owners: tuple[str, ...],
    accessible: bool,
    limit: int,
) -> None:
    """Search checkpoints, newest first. All filters must match.

    \b
    Examples:
      tinkex checkpoint search --base-model Qwen/Qwen3-0.6B --type external
      tinkex checkpoint search --metadata stage=sft --limit 0 --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex import types

    if limit < 0:
        raise click.UsageError("--limit must be at least 0")
    if owners and accessible:
        raise click.UsageError("give either --owner or --accessible")
    pairs = [item.partition("=") for item in metadata]
    if not all(separator for _, separator, _ in pairs):
        raise click.UsageError("--metadata takes NAME=VALUE")
    owner: types.SearchOwner = types.OwnSearchOwner()
    if owners:
        owner = types.UserSearchOwner(owner_urns=list(owners))
    elif accessible:
        owner = types.AccessibleSearchOwner()
    request = types.CheckpointSearchRequest(
        project_ids=list(projects) or None,
        base_models=list(base_models) or None,
        checkpoint_type=None if kind is None else TYPES[kind],
        user_metadata={name: value for name, _, value in pairs},
        owner=owner,
        limit=min(limit or MAX_SEARCH_PAGE, MAX_SEARCH_PAGE),
    )
    with experimental_calls():
        found = list(islice(invocation.rest().iter_search_checkpoints(request), limit or None))
    title = f"{len(found)} checkpoint{'s' if len(found) != 1 else ''}"
    _show(invocation, found, {"checkpoints": [one.model_dump(mode="json") for one in found]}, title)


@checkpoint.command()
@click.argument("path", type=CheckpointPath())
@pass_invocation
def info(invocation: Invocation, path: str) -> None:
    """Show one checkpoint: size, age, adapter, base model.

    \b
    Examples:
      tinkex checkpoint info tinker://0a1b2c:train:0/weights/final
      tinkex checkpoint info tinker://0a1b2c:train:0/sampler_weights/final --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex.cli.render import or_missing, relative_time, size, yes_no

    rest = invocation.rest()
    run_id = path.removeprefix("tinker://").split("/")[0]
    pending = rest.get_weights_info_by_tinker_path(path)
    listed = rest.list_checkpoints(run_id).result().checkpoints
    found = next((one for one in listed if one.tinker_path == path), None)
    if found is None:
        raise SetupError(
            f"run {run_id} has no checkpoint {path}; list them with: "
            f"tinkex checkpoint list --run-id {run_id}{invocation.server_options}"
        )
    weights = pending.result()
    value = {**found.model_dump(mode="json"), **weights.model_dump(mode="json")}
    rank = f"Yes (rank {weights.lora_rank})" if weights.lora_rank else yes_no(weights.is_lora)
    rows = [
        ("Checkpoint ID", found.checkpoint_id),
        ("Type", found.checkpoint_type),
        ("Tinker Path", found.tinker_path),
        ("Size", size(found.size_bytes)),
        ("Public", yes_no(found.public)),
        ("Created", relative_time(found.time)),
        ("Expires", relative_time(found.expires_at, missing="Never")),
        ("Training Run ID", run_id),
        ("Base Model", or_missing(weights.base_model)),
        ("LoRA", rank),
    ]
    rows += [(f"Metadata {name}", str(item)) for name, item in (found.user_metadata or {}).items()]
    invocation.properties(value, rows)


checkpoint.add_command(save)
checkpoint.add_command(download)
checkpoint.add_command(upload)


@checkpoint.command()
@click.argument("paths", nargs=-1, type=CheckpointPath())
@click.option(
    "--run-id",
    type=RunId(),
    help="Delete the checkpoints of this run that match the filters; without filters, all of them.",
)
@click.option("--type", "kind", type=click.Choice(list(TYPES)), help="Filter: only this type.")
@click.option("--before", type=Timestamp(), help="Filter: created before this time (UTC).")
@click.option("--after", type=Timestamp(), help="Filter: created after this time (UTC).")
@click.option("-y", "--yes", is_flag=True, help="Skip the confirmation.")
@pass_invocation
def delete(
    invocation: Invocation,
    paths: tuple[str, ...],
    run_id: str | None,
    kind: str | None,
    before: datetime | None,
    after: datetime | None,
    yes: bool,
) -> None:
    """Delete checkpoints permanently, after confirmation. Deletes in parallel and reports every failure.

    \b
    Examples:
      tinkex checkpoint delete tinker://0a1b2c:train:0/weights/step-10
      tinkex checkpoint delete --run-id 0a1b2c:train:0 --type sampler --before 2026-06-01 --yes
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    if bool(paths) == (run_id is not None):
        raise click.UsageError("give either checkpoint paths or --run-id")
    if run_id is None and (kind or before or after):
        raise click.UsageError("--type, --before and --after filter the checkpoints of a run; add --run-id")
    rest = invocation.rest()
    chosen = list(dict.fromkeys(paths))
    listed: list[Checkpoint] = []
    if run_id is not None:
        listed = [
            one
            for one in rest.list_checkpoints(run_id).result().checkpoints
            if (kind is None or one.checkpoint_type == TYPES[kind])
            and (before is None or one.time < before)
            and (after is None or one.time > after)
        ]
        chosen = [one.tinker_path for one in listed]
    if not chosen:
        invocation.result(f"Run {run_id} has no matching checkpoint.", {"deleted_count": 0, "failed": []})
        return
    if not yes and not _confirm_delete(chosen, listed):
        invocation.result("Nothing was deleted.", {"deleted_count": 0, "failed": []})
        return
    failed = _delete(invocation, rest, chosen)
    num_deleted = len(chosen) - len(failed)
    invocation.result(
        f"Deleted {num_deleted} checkpoint{'s' if num_deleted != 1 else ''}.",
        {
            "deleted_count": num_deleted,
            "failed": [{"tinker_path": path, "error": error} for path, error in failed],
        },
    )
    if failed:
        details = "\n".join(f"  {path}: {error}" for path, error in failed)
        raise SetupError(f"{len(failed)} of {len(chosen)} were not deleted:\n{details}")


@checkpoint.command()
@click.argument("path", type=CheckpointPath())
@pass_invocation
def publish(invocation: Invocation, path: str) -> None:
    """Make a checkpoint readable for every user of the server.

    \b
    Examples:
      tinkex checkpoint publish tinker://0a1b2c:train:0/sampler_weights/final
      tinkex checkpoint publish tinker://0a1b2c:train:0/weights/final --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    invocation.rest().publish_checkpoint_from_tinker_path(path).result()
    invocation.result(f"Published {path}.", {"action": "publish", "path": path})


@checkpoint.command()
@click.argument("path", type=CheckpointPath())
@pass_invocation
def unpublish(invocation: Invocation, path: str) -> None:
    """Make a published checkpoint private.

    \b
    Examples:
      tinkex checkpoint unpublish tinker://0a1b2c:train:0/sampler_weights/final
      tinkex checkpoint unpublish tinker://0a1b2c:train:0/weights/final --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    invocation.rest().unpublish_checkpoint_from_tinker_path(path).result()
    invocation.result(f"Unpublished {path}.", {"action": "unpublish", "path": path})


@checkpoint.command("set-ttl")
@click.argument("path", type=CheckpointPath())
@click.option(
    "--ttl", type=click.IntRange(min=1), metavar="SECONDS", help="Delete it this many seconds from now."
)
@click.option("--remove", is_flag=True, help="Remove the expiry.")
@pass_invocation
def set_ttl(invocation: Invocation, path: str, ttl: int | None, remove: bool) -> None:
    """Set or remove the expiry of a checkpoint.

    \b
    Examples:
      tinkex checkpoint set-ttl tinker://0a1b2c:train:0/weights/step-10 --ttl 86400
      tinkex checkpoint set-ttl tinker://0a1b2c:train:0/weights/final --remove
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    if (ttl is None) != remove:
        raise click.UsageError("give exactly one of --ttl SECONDS and --remove")
    invocation.rest().set_checkpoint_ttl_from_tinker_path(path, ttl).result()
    text = f"{path} does not expire." if ttl is None else f"{path} expires in {ttl} s."
    invocation.result(text, {"action": "set-ttl", "path": path, "ttl_seconds": ttl})


checkpoint.add_command(push_hf)
checkpoint.add_command(merge)


def _confirm_delete(paths: Sequence[str], listed: Sequence[Checkpoint]) -> bool:
    """Prints the checkpoints and asks for confirmation."""
    from tinkex.cli.render import relative_time, size

    by_path = {one.tinker_path: one for one in listed}
    for path in paths:
        one = by_path.get(path)
        details = f" ({size(one.size_bytes)}, created {relative_time(one.time)})" if one is not None else ""
        click.echo(f"  {path}{details}", err=True)
    question = f"Delete {len(paths)} checkpoint{'s' if len(paths) != 1 else ''} permanently?"
    return confirm(question)


def _delete(invocation: Invocation, rest: RestClient, paths: Sequence[str]) -> list[tuple[str, str]]:
    """Deletes the paths in parallel; returns those that failed, each with its error."""
    from concurrent.futures import ThreadPoolExecutor

    from tinkex.cli.progress import count_bar

    with (
        ThreadPoolExecutor(max_workers=min(MAX_PARALLEL_DELETES, len(paths))) as pool,
        count_bar(invocation, "Deleting", len(paths)) as advance,
    ):

        def remove(path: str) -> tuple[str, str] | None:
            try:
                rest.delete_checkpoint_from_tinker_path(path).result()
            except TinkexError as error:
                return path, failure_of(error, is_local=invocation.is_local).message
            finally:
                advance()
            return None

        return [failure for failure in pool.map(remove, paths) if failure is not None]
