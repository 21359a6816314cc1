"""What a command says when it fails: a line and a hint for people, one JSON object with ``--json``; on stderr."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

import click

from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    AuthenticationError,
    BillingError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    TinkexError,
)

__all__ = ["Failure", "failure_of"]

HINTS: tuple[tuple[type[TinkexError], str], ...] = (
    (
        AuthenticationError,
        (
            "give the key with --api-key or TINKER_API_KEY, or store it with: tinkex auth login. "
            "'tinkex serve' prints its key when it starts"
        ),
    ),
    (PermissionDeniedError, "see whose key this is with: tinkex auth whoami"),
    (BillingError, "the account of this key cannot pay; see its usage with: tinkex billing usage -h"),
    (
        NotFoundError,
        "see what this key has with: tinkex run list, tinkex checkpoint list or tinkex session list",
    ),
    (RateLimitError, "the server is busy; try again in a while"),
    (
        InternalServerError,
        "the server failed; its log says more. Try again, and check it with: tinkex doctor",
    ),
    (
        APIConnectionError,
        (
            "check the address (--base-url, TINKER_BASE_URL) and that the server runs, with: tinkex doctor. "
            "--local needs no server"
        ),
    ),
)
"""The next step by kind of error, the first that fits; errors of other kinds say theirs in their message."""


@dataclass(frozen=True)
class Failure:
    """The end of a command that did not do what it was asked."""

    type: str
    message: str
    hint: str | None
    exit_code: int

    def show(self, *, as_json: bool) -> None:
        """Says it on stderr."""
        if as_json:
            click.echo(json.dumps(asdict(self), ensure_ascii=False), err=True)
            return
        click.echo("Interrupted." if self.exit_code == 130 else f"Error: {self.message}", err=True)
        if self.hint is not None:
            click.echo(f"Hint: {self.hint}", err=True)


def failure_of(error: BaseException, *, if_interrupted: str | None = None) -> Failure:
    """The failure that an error means; ``if_interrupted`` says how to go on after a Ctrl-C.

    >>> failure_of(click.UsageError("no such option")).exit_code
    2
    >>> failure_of(KeyboardInterrupt()).type
    'Interrupted'
    """
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return Failure(
            "Interrupted", "interrupted by Ctrl-C, or by the end of the input", if_interrupted, 130
        )
    if isinstance(error, click.UsageError):
        hint = None if error.ctx is None else f"see: {error.ctx.command_path} -h"
        return Failure("UsageError", error.format_message(), hint, error.exit_code)
    if isinstance(error, click.ClickException):
        return Failure(type(error).__name__, error.format_message(), None, error.exit_code)
    if isinstance(error, OSError):
        return Failure(type(error).__name__, _of_the_system(error), None, 1)
    if not isinstance(error, TinkexError):
        return _unforeseen(error)
    return Failure(type(error).__name__, _said(error), _hint(error), 1)


def _of_the_system(error: OSError) -> str:
    """What the system refused, and to which file; without a file it was the output of the command."""
    said = error.strerror or str(error) or type(error).__name__
    return f"the output cannot be written ({said})" if error.filename is None else f"{error.filename}: {said}"


def _unforeseen(error: BaseException) -> Failure:
    """A fault of ours: said in a line, with the trace for those who ask for it."""
    if os.environ.get("TINKER_LOG", "").strip().lower() == "debug":
        import traceback

        traceback.print_exception(error)
    hint = "this is a fault of tinkex, not of yours; please report it with what TINKER_LOG=debug shows"
    return Failure(type(error).__name__, f"{type(error).__name__}: {error}", hint, 1)


def _hint(error: BaseException) -> str | None:
    return next((hint for kind, hint in HINTS if isinstance(error, kind)), None)


def _said(error: BaseException) -> str:
    """The server's own words without their wrapping; other errors as they are."""
    if isinstance(error, APIStatusError) and isinstance(error.body, dict):
        detail = error.body.get("detail")
        if isinstance(detail, str) and detail:
            where = f" from {error.request.url}" if error.request is not None else ""
            return f"{detail.rstrip('.')} ({error.status_code}{where})"
    return str(error) or type(error).__name__
