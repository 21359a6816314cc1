"""The error output of a failed command, on stderr: one line and a hint, or one JSON object with ``--json``."""

from __future__ import annotations

import json
import os
import re
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
            "give the key with --api-key or TINKER_API_KEY, or store it with: tinkex auth login{server}. "
            "'tinkex serve' prints its key when it starts"
        ),
    ),
    (PermissionDeniedError, "see whose key this is with: tinkex auth whoami{server}"),
    (BillingError, "the account of this key cannot pay; see its usage with: tinkex billing usage{server} -h"),
    (
        NotFoundError,
        (
            "see what this key has with: tinkex run list{server}, tinkex checkpoint list{server}, "
            "tinkex session list{server} or tinkex model list{server}"
        ),
    ),
    (RateLimitError, "the server is at capacity; try again later"),
    (
        InternalServerError,
        "the server failed; see its log. Try again, and check it with: tinkex doctor{server}",
    ),
    (
        APIConnectionError,
        (
            "check the address (--base-url, TINKER_BASE_URL) and that the server runs, with: tinkex doctor{server}. "
            "--local needs no server"
        ),
    ),
)
"""The next step for each type of error; the first match counts. Other errors have it in their message.

``{server}`` stands for the options that reach the same server.
"""

LOCAL_HINTS: tuple[tuple[type[TinkexError], str], ...] = (
    (
        NotFoundError,
        "see what is there with: tinkex run list --local, tinkex checkpoint list --local or tinkex model list --local",
    ),
    (InternalServerError, "the engine failed; try again, and check it with: tinkex doctor --local"),
    (APIConnectionError, "check the engine with: tinkex doctor --local"),
)
"""The same for the engine in the command's own process."""

RESUMABLE = (APIConnectionError, InternalServerError, RateLimitError)
"""Errors of a server that may pass: what has been done until then is kept."""

_PYTHON_CALL = re.compile(r"\w\(\)|\w\(['\"]|\bcreate_\w+")
"""Advice that only a program can follow."""

_ARGUMENT = re.compile(r"(--[a-z-]+(?: [A-Z.:]+)?) \(\w+=[^)]*\)")
"""An option, and the argument of a program that is the same."""


@dataclass(frozen=True)
class Failure:
    """The error of a failed command."""

    type: str
    message: str
    hint: str | None
    exit_code: int

    def show(self, *, as_json: bool) -> None:
        """Prints it on stderr."""
        if as_json:
            click.echo(json.dumps(asdict(self), ensure_ascii=False), err=True)
            return
        interrupted = self.exit_code == 130
        click.echo("Interrupted." if interrupted else f"Error: {self.message}", err=True)
        if self.hint is not None:
            click.echo(self.hint if interrupted else f"Hint: {self.hint}", err=True)


def failure_of(
    error: BaseException,
    *,
    interrupt_hint: str | None = None,
    is_local: bool = False,
    server_options: str = "",
) -> Failure:
    """The failure for an error; ``interrupt_hint`` says how to resume after a Ctrl-C, or when the server can be reached again.

    With ``is_local`` there is no server, so nothing is said about addresses, keys and statuses. ``server_options`` are those
    of the failed command, which the commands of the hint have too.

    >>> failure_of(click.UsageError("no such option")).exit_code
    2
    >>> failure_of(KeyboardInterrupt()).type
    'Interrupted'
    """
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return Failure(
            "Interrupted", "interrupted by Ctrl-C, or by the end of the input", interrupt_hint, 130
        )
    if isinstance(error, click.UsageError):
        hint = None if error.ctx is None else f"see: {error.ctx.command_path} -h"
        return Failure("UsageError", _options_only(error.format_message()), hint, error.exit_code)
    if isinstance(error, click.ClickException):
        return Failure(type(error).__name__, error.format_message(), None, error.exit_code)
    if isinstance(error, OSError):
        return Failure(type(error).__name__, _os_message(error), None, 1)
    if not isinstance(error, TinkexError):
        return _unexpected(error)
    hints = LOCAL_HINTS if is_local else HINTS
    hint = next((hint for kind, hint in hints if isinstance(error, kind)), None)
    hint = None if hint is None else hint.replace("{server}", server_options)
    if hint is not None and interrupt_hint is not None and isinstance(error, RESUMABLE):
        hint = f"{hint}. {interrupt_hint[0].upper()}{interrupt_hint[1:]}"
    return Failure(type(error).__name__, _message(error, is_local=is_local), hint, 1)


def _os_message(error: OSError) -> str:
    """The message of an OS error, with its file; without a file it concerns the output of the command."""
    cause = error.strerror or str(error) or type(error).__name__
    return (
        f"the output cannot be written ({cause})" if error.filename is None else f"{error.filename}: {cause}"
    )


def _unexpected(error: BaseException) -> Failure:
    """A bug of tinkex: one line, and the traceback with TINKER_LOG=debug."""
    if os.environ.get("TINKER_LOG", "").strip().lower() == "debug":
        import traceback

        traceback.print_exception(error)
    hint = "this is a bug in tinkex; please report it with the output of TINKER_LOG=debug"
    return Failure(type(error).__name__, f"{type(error).__name__}: {error}", hint, 1)


def _message(error: BaseException, *, is_local: bool) -> str:
    """The detail that the server sent, if any, without advice for programs; else the message of the error."""
    if isinstance(error, APIStatusError) and isinstance(error.body, dict):
        detail = error.body.get("detail")
        if isinstance(detail, str) and detail:
            parts = detail.rstrip(".").split("; ")
            shown = "; ".join(part for part in parts if not _PYTHON_CALL.search(part)) or detail
            where = f" from {error.request.url}" if error.request is not None else ""
            return shown if is_local else f"{shown} ({error.status_code}{where})"
    return _options_only(str(error)) or type(error).__name__


def _options_only(message: str) -> str:
    """The message without the arguments of programs beside options.

    >>> _options_only("remove --chat (chat=True), or give --reward FILE.PY:FUNCTION (reward=)")
    'remove --chat, or give --reward FILE.PY:FUNCTION'
    """
    return _ARGUMENT.sub(r"\1", message)
