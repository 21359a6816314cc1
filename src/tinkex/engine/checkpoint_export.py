"""Exports a checkpoint with its adapter merged into its base model, as a model directory or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from tinkex.engine.model.adapter_files import load_adapter
from tinkex.engine.model.export import ExportDtype, export_model
from tinkex.engine.model.gguf_export import GgufType, export_gguf
from tinkex.engine.model.progress import Progress
from tinkex.engine.model.stored_tensors import read_architecture
from tinkex.engine.trainer.checkpoint import MANIFEST_FILE, verify_manifest

__all__ = ["export_checkpoint"]


def export_checkpoint(
    checkpoint: Path,
    target: Path,
    *,
    base: Path,
    dtype: ExportDtype = "float32",
    gguf_type: GgufType | None = None,
    max_shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
) -> Path:
    """Writes the base model with the adapter of ``checkpoint`` merged into it as the new ``target``.

    ``target`` becomes a model directory with weights of ``dtype``, or a GGUF file with weights of ``gguf_type``. ``checkpoint`` is a checkpoint of this engine, which must match its manifest, or any PEFT directory; ``base`` is the
    directory of its base model. ``target`` must not exist; it is created atomically.

    Example:
        >>> row = find_checkpoint(engine.store, "local", "tinker://run-7/weights/0010")
        >>> base = engine.models.find(row.base_model).find_directory()
        >>> export_checkpoint(engine.store.directories.resolve(row.directory), Path("merged"), base=base)
        PosixPath('merged')
    """
    if (checkpoint / MANIFEST_FILE).exists():
        verify_manifest(checkpoint)
    adapter = load_adapter(checkpoint, read_architecture(base))
    if gguf_type is not None:
        return export_gguf(base, target, adapter, gguf_type=gguf_type, progress=progress)
    return export_model(
        base, target, adapter, dtype=dtype, max_shard_bytes=max_shard_bytes, progress=progress
    )
