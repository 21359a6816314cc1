"""``tinkex session``: sessions on a server and their timelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tinkex.cli.groups import CommandGroup
from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.cli.paging import fetch_items
from tinkex.cli.paths import ObjectId
from tinkex.errors import SetupError, TinkexError

PAGE_SIZE = 1000
SCOPES = click.Choice(["owned", "accessible"])


@click.group(cls=CommandGroup)
def session() -> None:
    """List and describe sessions, and export their timelines."""


@session.command("list")
@click.option(
    "--limit", default=20, show_default=True, help="Maximum number of sessions, newest first; 0 lists all."
)
@click.option("--offset", default=0, show_default=True, help="Number of sessions to skip.")
@click.option(
    "--access-scope",
    type=SCOPES,
    default="owned",
    show_default=True,
    help="Your own sessions, or all sessions that you can read.",
)
@pass_invocation
def list_(invocation: Invocation, limit: int, offset: int, access_scope: Any) -> None:
    """List sessions, newest first.

    \b
    Examples:
      tinkex session list --limit 5
      tinkex session list --limit 0 --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    rest = invocation.rest()
    ids, _ = fetch_items(
        lambda wanted, start: rest.list_sessions(wanted, start, access_scope).result(),
        lambda page: page.sessions,
        limit=limit,
        offset=offset,
        page_size=PAGE_SIZE,
    )
    invocation.table({"sessions": ids}, ["Session ID"], [[session_id] for session_id in ids])


@session.command()
@click.argument("session_id", type=ObjectId())
@click.option(
    "--access-scope",
    type=SCOPES,
    default="owned",
    show_default=True,
    help="Your own sessions, or all sessions that you can read.",
)
@pass_invocation
def info(invocation: Invocation, session_id: str, access_scope: Any) -> None:
    """Show the runs and samplers of a session.

    \b
    Examples:
      tinkex session info 4f9c0a2e
      tinkex session info 4f9c0a2e --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex.cli.render import or_missing

    found = invocation.rest().get_session(session_id, access_scope).result()
    rows = [("Session ID", session_id), ("Name", or_missing(found.display_name))]
    rows += [("Training run", run_id) for run_id in found.training_run_ids]
    rows += [("Sampler", sampler_id) for sampler_id in found.sampler_ids]
    rows += [(f"Metadata {name}", str(value)) for name, value in (found.user_metadata or {}).items()]
    invocation.properties({"session_id": session_id, **found.model_dump(mode="json")}, rows)


@session.command("export-trace")
@click.argument("session_id", type=ObjectId())
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write. Default: ./<session-id>.pftrace",
)
@click.option("--url-only", is_flag=True, help="Print the URL of the trace instead of downloading it.")
@pass_invocation
def export_trace(invocation: Invocation, session_id: str, output: Path | None, url_only: bool) -> None:
    """Export a session's timeline. Open the file in https://ui.perfetto.dev

    \b
    Examples:
      tinkex session export-trace 4f9c0a2e
      curl -o t.pftrace "$(tinkex session export-trace 4f9c0a2e --url-only)"
    """  # noqa: D301, D415 -- click reads the escape as "keep these lines"; an address ends the line
    from tinkex.checkpoints.files import Source, fetch
    from tinkex.cli.progress import transfer_bar
    from tinkex.cli.render import size

    rest = invocation.rest()
    invocation.status(f"Exporting the trace of session {session_id}; this may take a while.")
    try:
        url = rest.export_session_trace(session_id).result()
    except RuntimeError as error:
        if isinstance(error, TinkexError):
            raise
        raise SetupError(str(error)) from error
    if url_only:
        if invocation.as_json:
            invocation.json({"session_id": session_id, "url": url})
        else:
            click.echo(url)
        return
    target = output or Path.cwd() / f"{session_id.replace('/', '_')}.pftrace"
    invocation.interrupt_hint = "run the same command again to resume the download"
    with transfer_bar(invocation, "trace") as show:
        num_bytes = fetch(Source(url), target, config=invocation.config(), progress=show, replace=True)
    value = {"session_id": session_id, "destination": str(target), "file_size_bytes": num_bytes}
    rows = [("Session ID", session_id), ("Saved to", str(target)), ("Size", size(num_bytes))]
    invocation.properties(value, rows)
