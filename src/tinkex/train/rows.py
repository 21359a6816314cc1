"""Rows of training data: JSON lines, JSON, CSV, Parquet, and Hugging Face datasets, each with its place for errors."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkex.errors import ConfigError, SetupError
from tinkex.observability.terminal.loading import is_quiet

__all__ = ["Row", "read_rows"]

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
"""``owner/name`` or ``owner/name:split``."""
FILE_SUFFIXES = frozenset({".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".txt", ".parquet"})
EXPECTED = "a JSON lines, JSON, CSV or Parquet file, a dataset directory, or the name of a dataset of the Hub"
WRAPPERS = ("data", "rows", "examples", "train")
"""Names under which a JSON object holds the list of rows."""


@dataclass(frozen=True)
class Row:
    """One row of the data, or what is wrong with it."""

    where: str
    fields: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


def read_rows(source: Path) -> Iterator[Row]:
    r"""Yields the rows of a file, a dataset directory, or a dataset of the Hub (``owner/name``, ``owner/name:split``).

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder, "a.csv")
    ...     _ = file.write_text("prompt,completion\n2+2,4\n")
    ...     [row.fields for row in read_rows(file)]
    [{'prompt': '2+2', 'completion': '4'}]
    """
    if source.is_dir():
        return _directory_rows(source)
    if not source.exists() and source.suffix not in FILE_SUFFIXES and HUB_NAME.fullmatch(source.as_posix()):
        return _hub_rows(source.as_posix())
    if source.suffix == ".parquet":
        return _parquet_rows(source)
    text = _read_text(source)
    if source.suffix in {".csv", ".tsv"}:
        return _csv_rows(source, text)
    return _json_rows(source, text)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}; pass {EXPECTED}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as UTF-8 text ({error}); save it as UTF-8, or pass {EXPECTED}"
        ) from error


def _json_rows(path: Path, text: str) -> Iterator[Row]:
    try:
        value = json.loads(text)
    except (RecursionError, json.JSONDecodeError):  # usually at the second line
        return _json_line_rows(path, text)
    if isinstance(value, dict):
        lists = [value[name] for name in WRAPPERS if isinstance(value.get(name), list)]
        if not lists:
            return iter([_object_row(f"{path}:1", value)])
        value = lists[0]
    if not isinstance(value, list):
        return _json_line_rows(path, text)  # which names the line that is not an object
    return (_object_row(f"{path}, entry {number}", one) for number, one in enumerate(value, 1))


def _json_line_rows(path: Path, text: str) -> Iterator[Row]:
    # Not splitlines(): JSON strings may contain U+2028 and other Unicode line breaks.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if lines and not any(line.lstrip().startswith(("{", "[")) for _, line in lines):
        raise ConfigError(f"{path} contains no JSON objects; pass {EXPECTED}")
    return (_json_row(f"{path}:{number}", line) for number, line in lines)


def _json_row(where: str, line: str) -> Row:
    try:
        value = json.loads(line)
    except RecursionError:
        return Row(where, problem="the JSON is nested too deeply")
    except json.JSONDecodeError as error:
        return Row(where, problem=f"invalid JSON: {error.msg} at column {error.colno}")
    return _object_row(where, value)


def _object_row(where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        return Row(where, problem="the line is not a JSON object")
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:  # no tokenizer accepts it
        return Row(where, problem=f"it contains the lone surrogate {error.object[error.start]!r}")
    return Row(where, value)


def _csv_rows(path: Path, text: str) -> Iterator[Row]:
    header = text.split("\n", 1)[0]
    delimiter = "\t" if path.suffix == ".tsv" else max(",;\t", key=header.count)  # as spreadsheets write it
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for cells in reader:
            where = f"{path}:{reader.line_num}"
            if None in cells or None in cells.values():
                columns = len(reader.fieldnames or ())
                yield Row(where, problem=f"the row does not have the {columns} columns of the first line")
            else:
                yield Row(where, dict(cells))
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num}: invalid CSV: {error}") from error


def _parquet_rows(path: Path) -> Iterator[Row]:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; pass {EXPECTED}")
    try:
        from pyarrow import ArrowException, parquet  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise SetupError(f"{path} is a Parquet file, which needs {_missing(error)}") from error
    try:
        values: Sequence[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{path} is not a readable Parquet file ({error})") from error
    for number, value in enumerate(values, 1):
        yield _object_row(f"{path}, row {number}", value)


def _directory_rows(directory: Path) -> Iterator[Row]:
    if (directory / "dataset_info.json").exists() or (directory / "dataset_dict.json").exists():
        datasets = _datasets(f"{directory} is a dataset directory, which needs")
        try:
            with _progress_bars(datasets):
                loaded = datasets.load_from_disk(str(directory))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{directory} cannot be loaded as a dataset ({error})") from error
        yield from _dataset_rows(str(directory), loaded)
        return
    files = sorted(directory.glob("*.parquet")) or sorted(directory.glob("*.jsonl"))
    if not files:
        raise ConfigError(f"the directory {directory} holds no data; pass {EXPECTED}")
    for file in files:
        yield from read_rows(file)


def _hub_rows(name: str) -> Iterator[Row]:
    datasets = _datasets(f"there is no file {name}, and to load a dataset of that name from the Hub needs")
    dataset, _, split = name.partition(":")
    try:
        with _progress_bars(datasets):
            loaded = datasets.load_dataset(dataset, split=split or None)
    except Exception as error:  # the library raises errors of many packages
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ConfigError(
            f"there is no file {name}, and no dataset of that name could be loaded from the Hub: {reason.rstrip('.')}. A private "
            "one needs HF_TOKEN"
        ) from error
    yield from _dataset_rows(name, loaded)


def _dataset_rows(name: str, loaded: Any) -> Iterator[Row]:
    """Yields the rows of a dataset; of one with splits, those of ``train`` or of the only one."""
    if isinstance(loaded, dict):
        split = "train" if "train" in loaded else next(iter(loaded)) if len(loaded) == 1 else None
        if split is None:
            raise ConfigError(
                f"{name} has the splits {', '.join(loaded)}; choose one as {name}:{next(iter(loaded))}"
            )
        loaded = loaded[split]
    for number, value in enumerate(loaded, 1):
        yield _object_row(f"{name}, row {number}", dict(value))


@contextmanager
def _progress_bars(datasets: Any) -> Iterator[None]:
    """Hides the progress bars of ``datasets`` unless stderr is a terminal, and with ``--quiet`` also its warnings."""
    if (sys.stderr.isatty() and not is_quiet()) or datasets.are_progress_bars_disabled():
        yield
        return
    level = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    if is_quiet():
        datasets.logging.set_verbosity_error()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
        datasets.logging.set_verbosity(level)


def _datasets(reason: str) -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise SetupError(f"{reason} {_missing(error)}") from error
    return datasets


def _missing(error: ModuleNotFoundError) -> str:
    package = (error.name or "").partition(".")[0]
    return f"the package {package}; run: pip install 'tinkex[data]'"
