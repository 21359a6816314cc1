"""File modes of the data directory: it holds users' prompts and results, so no other account of the machine may read it."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger("tinkex.engine")

OTHER_ACCOUNTS = 0o077


def create_private(file: Path) -> None:
    """Create an empty file that only its owner can read, unless it exists."""
    os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))


def make_private(paths: Iterable[Path]) -> None:
    """Remove the access of other accounts to files and directories that have it; every change is logged.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     os.chmod(file.name, 0o644)
    ...     make_private([Path(file.name)])
    ...     oct(os.stat(file.name).st_mode & 0o777)
    '0o600'
    """
    if os.name != "posix":
        return
    for path in paths:
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & OTHER_ACCOUNTS:
                path.chmod(mode & ~OTHER_ACCOUNTS)
                logger.warning(
                    "%s could be accessed by other accounts: its mode was %04o and is now %04o",
                    path,
                    mode,
                    mode & ~OTHER_ACCOUNTS,
                )
        except FileNotFoundError:
            continue
        except PermissionError as error:
            logger.warning(
                "%s can be accessed by other accounts, and its mode cannot be changed: %s", path, error
            )
