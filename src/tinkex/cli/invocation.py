"""One run of a command: its server, its output, and the clients it uses."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tinkex.cli.streams import write_text
from tinkex.errors import APIStatusError, ExperimentalWarning, MissingApiKeyError, SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tinkex.clients.admin import AdminClient
    from tinkex.clients.rest import RestClient
    from tinkex.clients.service import ServiceClient
    from tinkex.config import Config
    from tinkex.futures import APIFuture

__all__ = ["Invocation", "experimental_calls", "pass_invocation"]

T_co = TypeVar("T_co", covariant=True)


INTERACTIVE_RETRIES = 3
"""For commands that a user waits for: about four seconds."""


@dataclass
class Invocation:
    """The values of the common options. Results are written to stdout, everything else to stderr."""

    base_url: str | None = None
    api_key: str | None = None
    timeout: float | None = None
    """The timeout of requests and results, in seconds; None: that of the settings, and no limit for results."""
    as_json: bool = False
    quiet: bool = False
    interrupt_hint: str | None = None
    """How to resume after a Ctrl-C or a failure of the server; set by commands that can be resumed."""
    _level: int | None = None
    _light: bool = False
    _announced: bool = False

    @property
    def is_local(self) -> bool:
        """Whether the command runs on the engine in its own process."""
        return (self.base_url or os.environ.get("TINKER_BASE_URL", "")).strip() == "local"

    @property
    def server_options(self) -> str:
        """The options with which another command reaches the same server."""
        if self.base_url is None:
            return ""
        return " --local" if self.base_url == "local" else f" --base-url {self.base_url}"

    # ---- printing ----

    def status(self, text: str) -> None:
        """Prints a status message on stderr; nothing with ``--quiet`` or ``--json``."""
        if not (self.quiet or self.as_json):
            click.echo(text, err=True)

    @property
    def shows_progress(self) -> bool:
        """Whether progress bars are shown on stderr."""
        return not (self.quiet or self.as_json) and sys.stderr.isatty()

    def result(self, text: str, value: Mapping[str, Any]) -> None:
        """Prints the result: ``text`` for people (none with ``--quiet``), ``value`` with ``--json``."""
        if self.as_json:
            self.json(value)
        elif text and not self.quiet:
            click.echo(text)

    def json(self, value: Mapping[str, Any]) -> None:
        """Prints a result as JSON."""
        from tinkex.cli.render import as_json

        click.echo(as_json(value))

    def write(self, text: str, output: Path | None) -> None:
        """Prints a result, or writes it to the file ``output``."""
        if output is None:
            write_text(text)
            return
        try:
            output.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise SetupError(f"{output} cannot be written ({error.strerror}); choose another file") from error
        self.status(f"Wrote {output}")

    def table(
        self,
        value: Mapping[str, Any],
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        title: str | None = None,
    ) -> None:
        """Prints a result as a table, or ``value`` with ``--json``."""
        if self.as_json:
            self.json(value)
            return
        from tinkex.cli.render import print_table

        print_table(columns, rows, title)

    def properties(
        self, value: Mapping[str, Any], rows: Sequence[tuple[str, str]], title: str | None = None
    ) -> None:
        """Prints the properties of one object."""
        from tinkex.cli.render import PROPERTIES

        self.table(value, PROPERTIES, rows, title)

    def silence(self) -> None:
        """Suppresses loading lines and warnings on stderr until :meth:`restore`."""
        import logging

        from tinkex.observability.terminal.loading import set_quiet

        set_quiet()
        if self._level is None:
            logger = logging.getLogger("tinkex")
            self._level = logger.level
            logger.setLevel(logging.ERROR)

    def restore(self) -> None:
        """Restores the state of the process; a program may run several commands."""
        if self._level is not None:
            import logging

            from tinkex.observability.terminal.loading import set_quiet

            set_quiet(quiet=False)
            logging.getLogger("tinkex").setLevel(self._level)
            self._level = None
        if self._light:
            from tinkex.tokenizers import prefer_light

            prefer_light(light=False)

    # ---- clients ----

    def config(self, *, max_retries: int | None = None) -> Config:
        """The settings of this command; without a key raises an error that names every way to give one."""
        from tinkex.config import Config

        if self.quiet or self.as_json:
            self.silence()
        if os.environ.get("TINKEX_MAX_RETRIES", "").strip():
            max_retries = None  # the user has set it
        try:
            return Config.resolve(
                base_url=self.base_url, api_key=self.api_key, timeout=self.timeout, max_retries=max_retries
            )
        except MissingApiKeyError as error:
            here = "" if self.base_url else "run on this machine with --local, which needs no key, "
            raise SetupError(
                f"no API key for {self.base_url or 'this server'}. Set TINKER_API_KEY, {here}"
                f"or log in with: tinkex auth login{self.server_options}"
            ) from error

    def wait(self, future: APIFuture[T_co], what: str) -> T_co:
        """The result of an operation; raises ``SetupError`` after ``--timeout``."""
        try:
            return future.result(self.timeout)
        except TimeoutError as error:
            if self.timeout is None:
                raise
            raise SetupError(
                f"{what} did not finish within {self.timeout:g} s; give it more time with --timeout"
            ) from error

    def rest(self) -> RestClient:
        """A client for runs, checkpoints and sessions."""
        from tinkex.clients.rest import RestClient

        return RestClient(config=self.config(max_retries=INTERACTIVE_RETRIES))

    def admin(self) -> AdminClient:
        """A client for usage."""
        from tinkex.clients.admin import AdminClient

        return AdminClient(config=self.config(max_retries=INTERACTIVE_RETRIES))

    def announce(self) -> None:
        """Says, once and before anything heavy is imported, that the engine starts in this process."""
        if self.is_local and not self._announced:
            self._announced = True
            self.status("starting the engine in this process")

    def service(self, display_name: str | None = None) -> ServiceClient:
        """A client that trains and samples, with all retries once the server has replied."""
        self.announce()
        from tinkex.clients.service import ServiceClient
        from tinkex.tokenizers import prefer_light

        config = self.verified_config()
        prefer_light()  # a command must not wait seconds for an import
        self._light = True
        return ServiceClient(config=config, display_name=display_name)

    def verified_config(self) -> Config:
        """The settings of long commands: with all retries, after a health check with few, so that a wrong URL fails fast."""
        config = self.config()
        if not config.is_local:
            with suppress(APIStatusError):  # the server replies; the command itself raises its error
                self.rest().get_health().result()
        return config


pass_invocation = click.make_pass_decorator(Invocation, ensure=True)


@contextmanager
def experimental_calls() -> Iterator[None]:
    """Silences the warnings of experimental calls: what may change is the command's own concern."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield
