"""``tinkex run``: training runs on a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.groups import CommandGroup
from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.cli.paging import fetch_items
from tinkex.cli.paths import RunId
from tinkex.cli.run_prompt import prompt_options, sample_prompt

if TYPE_CHECKING:
    from tinkex.types import TrainingRun

PAGE_SIZE = 100
SCOPES = click.Choice(["owned", "accessible"])


def _lora(run: TrainingRun) -> str:
    if not run.is_lora:
        return "No"
    return f"Rank {run.lora_rank}" if run.lora_rank else "Yes"


def _relative(when: Any) -> str:
    from tinkex.cli.render import relative_time

    return relative_time(when)


def _last_checkpoint(run: TrainingRun) -> Any:
    return run.last_checkpoint or run.last_sampler_checkpoint


COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "id": ("Run ID", lambda run: run.training_run_id),
    "model": ("Base Model", lambda run: run.base_model),
    "owner": ("Owner", lambda run: run.model_owner),
    "lora": ("LoRA", _lora),
    "updated": ("Last Update", lambda run: _relative(run.last_request_time)),
    "status": ("Status", lambda run: "Failed" if run.corrupted else "Active"),
    "checkpoint": (
        "Last Checkpoint",
        lambda run: last.checkpoint_id if (last := _last_checkpoint(run)) is not None else "N/A",
    ),
    "checkpoint_time": (
        "Checkpoint Time",
        lambda run: _relative(last.time) if (last := _last_checkpoint(run)) is not None else "N/A",
    ),
}
DEFAULT_COLUMNS = "id,model,lora,updated,status"


@click.group(cls=CommandGroup, invoke_without_command=True)
@prompt_options
@pass_invocation
@click.pass_context
def run(ctx: click.Context, invocation: Invocation, /, **options: Any) -> None:
    """List and describe training runs, or sample from a prompt.

    \b
    Examples:
      tinkex run --prompt "The capital of France is" --max-tokens 8 --local
      tinkex run --prompt-file tokens.json --num-samples 2 --json --output samples.json
      tinkex run list
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    given = [name for name, value in options.items() if value is not None]
    if ctx.invoked_subcommand is not None:
        if given:
            raise click.UsageError(f"--{given[0].replace('_', '-')} is an option of 'tinkex run --prompt …'")
    elif given:
        sample_prompt(invocation, options)
    else:
        click.echo(ctx.get_help())


@run.command("list")
@click.option(
    "--limit", default=20, show_default=True, help="Maximum number of runs, newest first; 0 lists all."
)
@click.option("--offset", default=0, show_default=True, help="Number of runs to skip.")
@click.option(
    "--access-scope",
    type=SCOPES,
    default="owned",
    show_default=True,
    help="Your own runs, or all runs that you can read.",
)
@click.option("--project-id", help="List only runs of this project.")
@click.option(
    "-c",
    "--columns",
    default=DEFAULT_COLUMNS,
    show_default=True,
    help=f"Columns, comma-separated: {', '.join(COLUMNS)}.",
)
@pass_invocation
def list_(
    invocation: Invocation, limit: int, offset: int, access_scope: Any, project_id: str | None, columns: str
) -> None:
    """List training runs.

    \b
    Examples:
      tinkex run list
      tinkex run list --limit 0 --columns id,model,checkpoint --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    selected = [name.strip() for name in columns.split(",") if name.strip()]
    unknown = [name for name in selected if name not in COLUMNS]
    if unknown or not selected:
        raise click.UsageError(
            f"unknown column {', '.join(unknown) or '(none given)'}; choose from: {', '.join(COLUMNS)}"
        )
    rest = invocation.rest()
    runs, total = fetch_items(
        lambda wanted, start: rest.list_training_runs(wanted, start, access_scope, project_id).result(),
        lambda page: page.training_runs,
        limit=limit,
        offset=offset,
        page_size=PAGE_SIZE,
    )
    title = f"{len(runs)} training run{'s' if len(runs) != 1 else ''}"
    if total is not None and total > offset + len(runs):
        title += f" ({total - offset - len(runs)} more; --limit 0 shows all)"
    value = {"runs": [found.model_dump(mode="json") for found in runs], "total": total}
    invocation.table(
        value,
        [COLUMNS[name][0] for name in selected],
        [[COLUMNS[name][1](found) for name in selected] for found in runs],
        title,
    )


@run.command()
@click.argument("run_id", type=RunId())
@click.option(
    "--access-scope",
    type=SCOPES,
    default="owned",
    show_default=True,
    help="Your own runs, or all runs that you can read.",
)
@pass_invocation
def info(invocation: Invocation, run_id: str, access_scope: Any) -> None:
    """Show one training run: model, owner, adapter, last checkpoints.

    \b
    Examples:
      tinkex run info 0a1b2c:train:0
      tinkex run info 0a1b2c:train:0 --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex.cli.render import relative_time

    found = invocation.rest().get_training_run(run_id, access_scope).result()
    rows = [(title, read(found)) for title, read in (COLUMNS[name] for name in
            ("id", "model", "owner", "lora", "updated", "status"))]  # fmt: skip
    for title, last in (
        ("Last Checkpoint", found.last_checkpoint),
        ("Last Sampler Checkpoint", found.last_sampler_checkpoint),
    ):
        if last is not None:
            expiry = relative_time(last.expires_at, missing="never")
            rows.append((title, f"{last.tinker_path} ({relative_time(last.time)}, expires {expiry})"))
    rows += [(f"Metadata {name}", str(value)) for name, value in (found.user_metadata or {}).items()]
    invocation.properties(found.model_dump(mode="json"), rows)
