"""Work on the engine's own files: adapters imported into its data directory, and merged into base models."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.cli.paths import CheckpointPath
from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tinkex.cli.invocation import Invocation

__all__ = ["import_into_engine", "merge_adapter"]

NEEDED = "this works on the engine's files, and {missing} is not installed; run: pip install 'tinkex[engine]'"


def import_into_engine(
    directory: Path, base_model: str | None, name: str, owner: str | None, data_dir: Path | None
) -> str:
    """Imports a PEFT adapter and returns the path of the new checkpoint."""
    try:
        from tinkex.engine.checkpoint_import import import_checkpoint
        from tinkex.engine.config import EngineConfig, data_dir_from_env, models_from_env
        from tinkex.engine.model.catalog import parse_model_flag
        from tinkex.engine.served_models import ServedModels
        from tinkex.engine.store import LOCAL_USER, Store
    except ModuleNotFoundError as error:
        raise SetupError(NEEDED.format(missing=error.name)) from error
    served = dict(parse_model_flag(flag) for flag in models_from_env())
    config = EngineConfig(data_dir=data_dir or data_dir_from_env(), models=served, any_directory=True)
    wanted = base_model or _declared_base(directory)
    base = ServedModels(config).find(wanted).find_directory()
    with Store(config.engine_dir) as store:
        row = import_checkpoint(
            store, directory, base=base, base_model=wanted, name=name, owner=owner or LOCAL_USER
        )
    return row.path


def merge_adapter(
    invocation: Invocation, source: str, output: Path, base_model: str | None, dtype: Any
) -> Path:
    """Merges a checkpoint or an adapter directory into its base model and returns where it was written."""
    if output.exists():
        raise SetupError(f"{output} exists already; choose another directory, or remove it")
    try:
        from tinkex.engine.checkpoint_export import export_checkpoint
        from tinkex.engine.config import tinkex_home
        from tinkex.engine.model.catalog import resolve
    except ModuleNotFoundError as error:
        raise SetupError(NEEDED.format(missing=error.name)) from error
    from tinkex.observability.terminal import LoadingLine

    line = LoadingLine(sys.stderr)
    show = None if invocation.quiet or invocation.as_json else line.show
    with tempfile.TemporaryDirectory(prefix="tinkex-merge-") as folder:
        adapter_dir = Path(source)
        if source.startswith("tinker://"):
            from tinkex.checkpoints import download_checkpoint

            path = CheckpointPath().convert(source, None, None)
            found = download_checkpoint(path, Path(folder), config=invocation.verified_config())
            adapter_dir = found.directory
            if base_model is None:
                base_model = invocation.rest().get_weights_info_by_tinker_path(path).result().base_model
        elif not adapter_dir.is_dir():
            raise SetupError(f"{source} is neither a checkpoint path (tinker://…) nor a directory")
        base = resolve(_source_of(base_model or _declared_base(adapter_dir)), tinkex_home() / "models", show)
        try:
            return export_checkpoint(adapter_dir, output, base=base, dtype=dtype, progress=show)
        finally:
            line.clear()


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
        raise SetupError(f"{directory} is no PEFT adapter: it has no adapter_config.json") from None
    except (OSError, ValueError, AttributeError) as error:
        raise SetupError(f"{file} cannot be read ({error})") from error
    if not said:
        raise SetupError(f"{file} does not say which model it belongs to; give it with --base-model")
    return str(said)
