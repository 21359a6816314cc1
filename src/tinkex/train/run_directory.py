"""The local files of a run: its settings, a line per step, its checkpoints and the samples before training."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkex.errors import ConfigError, SetupError
from tinkex.train.rewards import split_weight
from tinkex.train.rows import read_rows
from tinkex.train.settings import GrpoSettings, Settings, settings_from

__all__ = ["RunDirectory", "StoredRun", "read_config"]

CONFIG, METRICS, CHECKPOINTS = "run.toml", "metrics.jsonl", "checkpoints.jsonl"
BEFORE, BEST = "before.json", "best.json"
OLD_CONFIG = "settings.json"
"""The settings of runs before 0.2."""


@dataclass(frozen=True)
class StoredRun:
    """The settings of a run, and where it ran."""

    settings: Settings
    base_model: str
    server: str | None
    """The base URL of the server; None for runs before 0.2."""
    digests: Mapping[str, str]
    """The digests of the files that the run depends on, by name."""


class RunDirectory:
    """The directory of one run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    def check_unused(cls, directory: Path) -> None:
        """Raises ``SetupError`` if the directory contains a run, or cannot be one."""
        if any((directory / name).exists() for name in (CONFIG, OLD_CONFIG)):
            raise SetupError(
                f"{directory} already contains a run; choose another --output (output=){cls._resuming(directory)}"
            )
        existing = next((path for path in (directory, *directory.parents) if path.exists()), Path())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            cause = "cannot be written" if existing.is_dir() else "is not a directory"
            raise SetupError(f"{existing} {cause}; choose another --output")

    @classmethod
    def _resuming(cls, directory: Path) -> str:
        """Returns how to resume the run in a directory, for messages; nothing if its settings cannot be read."""
        try:
            recipe = cls.read(directory).settings.recipe
        except (ConfigError, SetupError):
            return ""
        return f", or resume it with: tinkex train {recipe} --resume {shlex.quote(str(directory))}"

    @classmethod
    def new(cls, settings: Settings, base_model: str, server: str) -> RunDirectory:
        """Creates the directory of a run; raises ``SetupError`` if it already contains one."""
        cls.check_unused(settings.output)
        run_directory = cls(settings.output)
        config = run_directory.directory / CONFIG
        plain = {name: value for name, value in settings.as_json().items() if name != "output"}
        plain["run"] = {
            "base_model": base_model,
            "server": server,
            "started_in": str(Path.cwd()),
            **{name: digest(file) for name, (file, digest) in _inputs(settings).items()},
        }
        try:
            run_directory.directory.mkdir(parents=True, exist_ok=True)
            write_text(config, f"# Repeat this run with: tinkex train --config {config}\n\n{to_toml(plain)}")
        except OSError as error:
            raise SetupError(
                f"{run_directory.directory} cannot be written ({error.strerror or error}); choose another --output"
            ) from error
        return run_directory

    def discard(self) -> None:
        """Deletes what :meth:`new` has written, so that the name can be used again."""
        (self.directory / CONFIG).unlink(missing_ok=True)
        with suppress(OSError):  # other files are in it
            self.directory.rmdir()

    @classmethod
    def open(cls, directory: Path) -> tuple[RunDirectory, StoredRun]:
        """Opens the directory of an earlier run; its data and rewards must be unchanged."""
        stored = cls.read(directory)
        for name, (file, digest) in _inputs(stored.settings).items():
            if name in stored.digests and digest(file) != stored.digests[name]:
                raise ConfigError(
                    f"{file} has changed since this run started, so its steps would differ; restore the file, or start a "
                    "new run with --model-path and the last checkpoint"
                )
        return cls(directory), stored

    @classmethod
    def read(cls, directory: Path) -> StoredRun:
        """Returns the settings of an earlier run."""
        try:
            if (directory / CONFIG).exists():
                plain = tomllib.loads((directory / CONFIG).read_text(encoding="utf-8"))
                about = plain.pop("run")
            else:
                plain = json.loads((directory / OLD_CONFIG).read_text(encoding="utf-8"))
                about = {name: plain.pop(name) for name in ("base_model", "data_sha256")}
            settings = settings_from({**_located(plain, about), "output": str(directory)})
            digests = {name: str(value) for name, value in about.items() if name.endswith("sha256")}
            return StoredRun(settings, str(about["base_model"]), about.get("server"), digests)
        except (FileNotFoundError, NotADirectoryError):
            raise SetupError(
                f"{directory} contains no run: it has no {CONFIG}; give the directory that 'run in …' named when it started"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise SetupError(f"the settings in {directory} cannot be read ({error!r})") from error

    def add_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records a step, or an evaluation after it."""
        self._append(METRICS, {"step": step, **metrics})

    def steps(self) -> list[dict[str, Any]]:
        """Returns all recorded steps, in order."""
        return self._lines(METRICS)

    def add_checkpoint(self, step: int, path: str) -> None:
        """Records a checkpoint of the state after ``step`` steps."""
        self._append(CHECKPOINTS, {"step": step, "path": path})

    def save_best(self, best: Mapping[str, Any]) -> None:
        """Stores the checkpoints with the best evaluation."""
        write_text(self.directory / BEST, json.dumps(best, indent=2) + "\n")

    def best(self) -> dict[str, Any] | None:
        """Returns the checkpoints with the best evaluation; None if there are none."""
        return self._read(BEST)

    def checkpoints(self) -> list[dict[str, Any]]:
        """Returns all recorded checkpoints, in order."""
        return self._lines(CHECKPOINTS)

    def rewind(self, step: int, *, evaluations: bool = True) -> None:
        """Deletes the records after ``step``; without ``evaluations`` also the evaluation after that step."""
        kept = [
            line
            for line in self.steps()
            if line["step"] < step or (line["step"] == step and (evaluations or not _is_evaluation(line)))
        ]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        (self.directory / METRICS).write_text(text, encoding="utf-8")

    def save_baseline(self, answers: Mapping[str, Any]) -> None:
        """Stores the samples before training."""
        write_text(self.directory / BEFORE, json.dumps(answers, indent=2, ensure_ascii=False) + "\n")

    def baseline(self) -> dict[str, Any] | None:
        """Returns the samples before training; None if there are none."""
        return self._read(BEFORE)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            kept = json.loads((self.directory / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return kept if isinstance(kept, dict) else None

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        with (self.directory / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        try:
            text = (self.directory / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        lines = []
        for line in text.split("\n"):
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue  # a partial line of a process that was killed during the write
        return lines


def read_config(file: Path, output: Path) -> tuple[Settings, str | None]:
    """Reads a file such as ``run.toml``: the settings, for a new run in ``output``, and the server of the run that wrote it."""
    try:
        plain = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {file}; every run writes its settings to {CONFIG}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a TOML file ({error})") from error
    about = plain.pop("run", {})
    if not isinstance(about, dict) or not isinstance(server := about.get("server"), str | None):
        raise ConfigError(
            f"{file}: [run] is written by a run, and describes it; remove it from a file of your own"
        )
    try:
        return settings_from({**_located(plain, about), "output": str(output)}), server
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _located(plain: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings whose relative paths that do not exist here are those of the directory where the run was started."""
    started_in = about.get("started_in")
    if not isinstance(started_in, str):
        return dict(plain)

    def find(text: Any) -> Any:
        if isinstance(text, list):
            return [find(one) for one in text]
        if not isinstance(text, str):
            return text  # is rejected with the name of its setting
        there = Path(started_in, text)
        return text if Path(text).exists() or not there.exists() else str(there)

    def find_reward(text: Any) -> Any:
        if isinstance(text, list):
            return [find_reward(one) for one in text]
        if not isinstance(text, str):
            return text
        file, colon, function = text.rpartition(":")
        return f"{find(file)}{colon}{function}"

    found = {name: find(plain[name]) for name in ("data", "eval_data", "eval_tasks") if name in plain}
    if "reward" in plain:
        found["reward"] = find_reward(plain["reward"])
    return {**plain, **found}


def to_toml(plain: Mapping[str, Any]) -> str:
    """Returns settings as TOML; None is left out.

    >>> print(to_toml({"rank": 8, "model": None, "run": {"server": "local"}}), end="")
    rank = 8
    <BLANKLINE>
    [run]
    server = "local"
    """
    lines = [f"{name} = {_toml(v)}" for name, v in plain.items() if v is not None and not isinstance(v, dict)]
    for name, table in plain.items():
        if isinstance(table, dict) and table:
            lines += ["", f"[{name}]", *(f"{_toml(key)[1:-1]} = {_toml(v)}" if key.isidentifier() and key.isascii()
                                         else f"{_toml(key)} = {_toml(v)}" for key, v in table.items())]  # fmt: skip
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return "[" + ", ".join(_toml(item) for item in value) + "]"


def write_text(file: Path, text: str) -> None:
    """Writes a file completely or not at all."""
    partial = file.with_name(f".{file.name}.new")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def _is_evaluation(line: Mapping[str, Any]) -> bool:
    return any(name.startswith("eval_") for name in line)


def _inputs(settings: Settings) -> dict[str, tuple[Path, Callable[[Path], str]]]:
    """Returns the files that a run depends on, each with the function for its digest, by the name of the digest."""
    inputs: dict[str, tuple[Path, Callable[[Path], str]]] = {"data_sha256": (settings.data, _digest)}
    if settings.eval_data is not None:
        inputs["eval_data_sha256"] = (settings.eval_data, _digest)
    if isinstance(settings, GrpoSettings):
        for number, place in enumerate(settings.reward, 1):
            file = Path(split_weight(place)[0].rpartition(":")[0])
            inputs[f"reward_{number}_sha256"] = (file, _digest_file)
    return inputs


def _digest(source: Path) -> str:
    """Returns the digest of a file; of a directory or a dataset, that of its rows."""
    if not source.is_file():
        digest = hashlib.sha256()
        for row in read_rows(source):
            digest.update(json.dumps(row.fields, sort_keys=True, default=str).encode())
        return digest.hexdigest()
    return _digest_file(source)


def _digest_file(source: Path) -> str:
    try:
        with source.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{source} cannot be read ({error.strerror}), and this run needs it") from error
