"""The credentials file of a login: ``~/.tinker/credentials.json``, shared with other Tinker tools."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinkex.errors import ConfigError

__all__ = ["Credentials", "StoredKey", "credentials_file"]

VERSION = 1


def credentials_file(environ: Mapping[str, str] | None = None) -> Path:
    """Returns the path of the credentials file.

    >>> credentials_file({"HOME": "/home/ada"}).as_posix()
    '/home/ada/.tinker/credentials.json'
    """
    home = (os.environ if environ is None else environ).get("HOME")
    return (Path(home) if home else Path.home()) / ".tinker" / "credentials.json"


@dataclass(frozen=True)
class StoredKey:
    """One key: ``manual`` ones were pasted, ``generated`` ones were created for this machine; a logout revokes them."""

    key: str
    name: str
    type: Literal["manual", "generated"] = "manual"
    note: str | None = None
    details: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        return f"StoredKey(name={self.name!r}, type={self.type!r}, key=…)"


@dataclass
class Credentials:
    """The file's content; :meth:`save` replaces the file atomically, with mode 0600.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as home:
    ...     file = Path(home) / ".tinker" / "credentials.json"
    ...     stored = Credentials.load(file)
    ...     stored.add("7", StoredKey("tml-abc", "laptop"))
    ...     stored.save()
    ...     Credentials.load(file).default
    '7'
    """

    file: Path
    default: str | None = None
    keys: dict[str, StoredKey] = field(default_factory=dict)

    @classmethod
    def load(cls, file: Path | None = None) -> Credentials:
        """Reads the file; returns empty credentials if there is none."""
        file = file or credentials_file()
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if content["version"] != VERSION:
                raise ConfigError(
                    f"{file} has version {content['version']!r}, but only {VERSION} is supported; update tinkex"
                )
            keys = {key_id: _key(entry) for key_id, entry in content["keys"].items()}
            return cls(file, content["default"], keys)
        except FileNotFoundError:
            return cls(file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{file} cannot be read as a credentials file ({error!r}); move it away and log in again"
            ) from error

    @property
    def default_key(self) -> StoredKey | None:
        """The key that clients use by default."""
        return self.keys.get(self.default) if self.default is not None else None

    def add(self, key_id: str, key: StoredKey) -> None:
        """Stores a key and makes it the default."""
        self.keys[key_id] = key
        self.default = key_id

    def remove_default(self) -> None:
        """Removes the default key."""
        if self.default is not None:
            self.keys.pop(self.default, None)
            self.default = None

    def save(self) -> None:
        """Writes the file."""
        content = {
            "version": VERSION,
            "default": self.default,
            "keys": {key_id: _entry(key) for key_id, key in self.keys.items()},
        }
        partial = self.file.with_name(f".{self.file.name}.{secrets.token_hex(4)}")
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as written:
                json.dump(content, written, indent=2)
                written.write("\n")
            partial.replace(self.file)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise ConfigError(
                f"{self.file} cannot be written ({error.strerror}); nothing was stored"
            ) from error


def _key(entry: Mapping[str, Any]) -> StoredKey:
    kind = entry["type"]
    if kind not in {"manual", "generated"}:
        raise ValueError(f"unknown key type {kind!r}")
    return StoredKey(entry["key"], entry["name"], kind, entry.get("note"), entry.get("details"))


def _entry(key: StoredKey) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": key.type, "key": key.key, "name": key.name}
    if key.note is not None:
        entry["note"] = key.note
    if key.details is not None:
        entry["details"] = dict(key.details)
    return entry
