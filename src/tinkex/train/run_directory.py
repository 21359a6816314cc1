"""The local files of a run: its settings, a line per step, its checkpoints and the samples before training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinkex.errors import ConfigError, SetupError
from tinkex.train.settings import Settings, settings_from

__all__ = ["RunDirectory"]

SETTINGS, METRICS, CHECKPOINTS, BEFORE = "settings.json", "metrics.jsonl", "checkpoints.jsonl", "before.json"


class RunDirectory:
    """The directory of one run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    def new(cls, settings: Settings, base_model: str) -> RunDirectory:
        """Creates the directory of a run; raises ``SetupError`` if it already contains one."""
        run_directory = cls(settings.output)
        if (run_directory.directory / SETTINGS).exists():
            raise SetupError(
                f"{run_directory.directory} already contains a run; resume it with --resume {run_directory.directory}, or choose another "
                "--output"
            )
        try:
            run_directory.directory.mkdir(parents=True, exist_ok=True)
            kept = {**settings.as_json(), "base_model": base_model, "data_sha256": _digest(settings.data)}
            run_directory._write(SETTINGS, kept)
        except OSError as error:
            raise SetupError(
                f"{run_directory.directory} cannot be written ({error.strerror or error}); choose another --output"
            ) from error
        return run_directory

    @classmethod
    def open(cls, directory: Path) -> tuple[RunDirectory, Settings, str]:
        """Opens the directory of an earlier run, with its settings and base model; its data must be unchanged."""
        run_directory = cls(directory)
        try:
            kept = json.loads((directory / SETTINGS).read_text(encoding="utf-8"))
            settings, base_model = settings_from(kept), str(kept["base_model"])
        except FileNotFoundError:
            raise SetupError(f"{directory} contains no run: it has no {SETTINGS}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise SetupError(f"{directory / SETTINGS} cannot be read ({error!r})") from error
        if _digest(settings.data) != kept.get("data_sha256"):
            raise ConfigError(
                f"{settings.data} has changed since this run started, so its batches would differ; restore the file, "
                "or start a new run with --model-path and the last checkpoint"
            )
        return run_directory, settings, base_model

    def add_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records a step, or an evaluation after it."""
        self._append(METRICS, {"step": step, **metrics})

    def steps(self) -> list[dict[str, Any]]:
        """Returns all recorded steps, in order."""
        return self._lines(METRICS)

    def add_checkpoint(self, step: int, path: str) -> None:
        """Records a checkpoint of the state after ``step`` steps."""
        self._append(CHECKPOINTS, {"step": step, "path": path})

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
        self._write(BEFORE, answers)

    def baseline(self) -> dict[str, Any] | None:
        """Returns the samples before training; None if there are none."""
        try:
            kept = json.loads((self.directory / BEFORE).read_text(encoding="utf-8"))
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

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        partial = self.directory / f".{name}.new"
        partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(self.directory / name)


def _is_evaluation(line: Mapping[str, Any]) -> bool:
    return any(name.startswith("eval_") for name in line)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); pass the file of examples") from error
