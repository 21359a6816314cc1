"""Work on the engine's own files: adapters merged into base models, and models exported for other programs."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.paths import CheckpointPath
from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tinkex.cli.invocation import Invocation

__all__ = ["export_base", "gguf_result", "merge_adapter"]

NEEDED = "this works on the engine's files, and {missing} is not installed; run: pip install 'tinkex[engine]'"


def _check_output(output: Path, gguf_type: str | None) -> None:
    """Raises ``SetupError`` for an output that exists, or whose name is not one of this format."""
    if output.is_symlink() or output.exists():
        raise SetupError(f"{output} exists already; choose another name, or remove it")
    if gguf_type is None and output.suffix == ".gguf":
        raise SetupError(
            f"{output} is the name of a GGUF file; add --gguf f16 or --gguf q8_0, or name a directory"
        )
    if gguf_type is not None and output.suffix != ".gguf":
        raise SetupError(
            f"a GGUF file has a name that ends in .gguf, such as {output}.gguf; choose such a name"
        )


def export_base(invocation: Invocation, source: str, output: Path, gguf_type: Any) -> Path:
    """Writes a base model as a GGUF file and returns where it was written."""
    _check_output(output, gguf_type)
    with _loading_line(invocation, source) as show:
        try:
            from tinkex.engine.config import tinkex_home
            from tinkex.engine.model.catalog import resolve
            from tinkex.engine.model.gguf_export import export_gguf
        except ModuleNotFoundError as error:
            raise SetupError(NEEDED.format(missing=error.name)) from error
        base = resolve(_source_of(source), tinkex_home() / "models", show)
        return export_gguf(base, output, gguf_type=gguf_type, progress=show)


def gguf_result(invocation: Invocation, source: str, file: Path, gguf_type: str) -> None:
    """Prints where a GGUF file is, and how to run it."""
    from tinkex.cli.render import size

    num_bytes = file.stat().st_size
    invocation.result(
        f"Wrote {file} ({size(num_bytes)}, {gguf_type.upper()}). Run it with: llama-cli -m {file}",
        {"source": source, "destination": str(file), "gguf_type": gguf_type, "size_bytes": num_bytes},
    )


@contextmanager
def _loading_line(
    invocation: Invocation, source: str
) -> Iterator[Callable[[str, int, int | None], None] | None]:
    """Yields a callback that shows progress, or None for a quiet command; the line is cleared at the end.

    It says first what is opened, before anything heavy is imported.
    """
    from tinkex.observability.terminal import LoadingLine

    line = LoadingLine(sys.stderr)
    show = None if invocation.quiet or invocation.as_json else line.show
    try:
        if show is not None:
            show(f"opening {source}", 0, None)
        yield show
    finally:
        line.clear()


def merge_adapter(
    invocation: Invocation, source: str, output: Path, base_model: str | None, dtype: Any, gguf_type: Any
) -> Path:
    """Merges a checkpoint or an adapter directory into its base model and returns where it was written."""
    _check_output(output, gguf_type)
    from tinkex.checkpoints.references import is_run_directory

    adapter_dir, path = Path(source), None
    if not adapter_dir.is_dir() or is_run_directory(adapter_dir):
        path = CheckpointPath().convert(source, None, click.get_current_context())
    with (
        _loading_line(invocation, source) as show,
        tempfile.TemporaryDirectory(prefix="tinkex-merge-") as folder,
    ):
        try:
            from tinkex.engine.checkpoint_export import export_checkpoint
            from tinkex.engine.config import tinkex_home
            from tinkex.engine.model.catalog import resolve
        except ModuleNotFoundError as error:
            raise SetupError(NEEDED.format(missing=error.name)) from error
        if path is not None:
            from tinkex.checkpoints import download_checkpoint

            found = download_checkpoint(path, Path(folder), config=invocation.verified_config())
            adapter_dir = found.directory
            if base_model is None:
                base_model = invocation.rest().get_weights_info_by_tinker_path(path).result().base_model
        base = resolve(_source_of(base_model or _declared_base(adapter_dir)), tinkex_home() / "models", show)
        return export_checkpoint(
            adapter_dir, output, base=base, dtype=dtype, gguf_type=gguf_type, progress=show
        )


def _source_of(name: str) -> str:
    """Where a model served on this machine under another name comes from."""
    from tinkex.engine.config import models_from_env
    from tinkex.engine.model.catalog import parse_model_flag

    return dict(parse_model_flag(flag) for flag in models_from_env()).get(name, name)


def _declared_base(directory: Path) -> str:
    file = directory / "adapter_config.json"
    try:
        said = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except FileNotFoundError:
        raise SetupError(f"{directory} is not a PEFT adapter: it has no adapter_config.json") from None
    except (OSError, ValueError, AttributeError) as error:
        raise SetupError(f"{file} cannot be read ({error})") from error
    if not said:
        raise SetupError(f"{file} does not say which model it belongs to; give it with --base-model")
    return str(said)
