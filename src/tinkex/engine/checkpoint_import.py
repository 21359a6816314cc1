"""Imports LoRA adapters: a PEFT directory becomes a checkpoint.

The source is not used in place. Its two files are copied without following links, validated and converted to the engine's
format, and the result is written like any other checkpoint: atomically, with a manifest. Other files of the source are
ignored, and pickles are never read.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

from tinkex.engine.model.adapter_config import CONFIG_FILE, MAX_CONFIG_BYTES, AdapterConfig
from tinkex.engine.model.adapter_files import (
    UNEMBED_BASE_NAMES,
    WEIGHTS_FILE,
    load_adapter,
    reject_pickle,
    save_adapter,
)
from tinkex.engine.model.lora import Adapter
from tinkex.engine.model.stored_tensors import StoredTensors, read_architecture
from tinkex.engine.store import (
    LOCAL_USER,
    CheckpointKind,
    CheckpointRow,
    RunRow,
    RunStatus,
    SessionRow,
    Store,
    check_name,
)
from tinkex.engine.trainer.checkpoint import write_manifest
from tinkex.errors import InvalidInput, SetupError
from tinkex.types import LoraConfig

__all__ = ["ImportedAdapter", "import_adapter", "import_checkpoint"]

MAX_WEIGHTS_BYTES = 16 << 30


@dataclass(frozen=True)
class ImportedAdapter:
    """The result of an import: the settings for a training client, and what the adapter's config declares."""

    lora: LoraConfig
    scale: float
    declared_base: str | None
    """The base model that the adapter's config names; only tensor shapes are checked against the base."""


def import_adapter(source: Path, target: Path, *, base: Path, base_model: str) -> ImportedAdapter:
    """Writes the PEFT adapter in ``source`` as the checkpoint directory ``target``, which must not exist.

    ``base`` is the directory of the adapter's base model, and ``base_model`` the name under which it is served.

    Example:
        >>> import_adapter(Path("my-peft-run"), Path("imported"), base=model_directory, base_model="Qwen/Qwen3-0.6B")
        ImportedAdapter(lora=LoraConfig(rank=16, ...), scale=2.0, declared_base='Qwen/Qwen3-0.6B')
    """
    if target.is_symlink() or target.exists():
        raise InvalidInput(f"{target} exists already; choose another directory, or remove it")
    partial = target.parent / f".{target.name}.partial-{secrets.token_hex(4)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        try:
            imported = _write_checkpoint(source, partial, base, base_model)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise SetupError(
            f"{target} cannot be written ({error.strerror or error}); free disk space, or choose another directory"
        ) from error
    return imported


def import_checkpoint(
    store: Store,
    source: Path,
    *,
    base: Path,
    base_model: str,
    name: str = "imported",
    owner: str = LOCAL_USER,
    user_metadata: Mapping[str, Any] | None = None,
) -> CheckpointRow:
    """Imports the PEFT adapter in ``source`` as a checkpoint of a new run of ``owner``; ``path`` of the result names it.

    It is then like a checkpoint saved by training, without an optimizer: create a training client from it, sample from
    it, list, publish or delete it.

    Example:
        >>> base = engine.models.find("Qwen/Qwen3-0.6B").find_directory()
        >>> row = import_checkpoint(engine.store, Path("my-peft-run"), base=base, base_model="Qwen/Qwen3-0.6B")
        >>> service.create_training_client_from_state(row.path)
        >>> service.create_sampling_client(model_path=row.path)
    """
    check_name(name)
    now = time.time()
    session = SessionRow(str(uuid.uuid4()), owner, now, now, display_name=f"import of {source.name}"[:200])
    run_id = f"{session.session_id}:train:0"
    with store.directories.checkpoint(run_id, CheckpointKind.WEIGHTS, name) as writing:
        imported = _write_checkpoint(source, writing.temporary, base, base_model)
    metadata = dict(user_metadata) if user_metadata is not None else None
    run = RunRow(
        run_id=run_id,
        session_id=session.session_id,
        owner=owner,
        base_model=base_model,
        created_at=now,
        used_at=now,
        status=RunStatus.RELEASED,  # no weights in memory
        lora=imported.lora,
        user_metadata=metadata,
    )
    row = CheckpointRow(
        run_id=run_id,
        kind=CheckpointKind.WEIGHTS,
        name=name,
        owner=owner,
        base_model=base_model,
        lora=imported.lora,
        has_optimizer=False,
        created_at=now,
        size_bytes=writing.size_bytes,
        directory=writing.final,
        user_metadata=metadata,
    )
    with store.database.transaction():
        store.sessions.add(session)
        store.sessions.finish(session.session_id, now, "success", None)
        store.runs.add(run)
        store.checkpoints.put(row)
    return row


def _write_checkpoint(source: Path, directory: Path, base: Path, base_model: str) -> ImportedAdapter:
    """Reads a copy of the source's files, and writes the adapter and manifest into ``directory``."""
    arch = read_architecture(base)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".source-") as copied:
        copy = Path(copied)
        _copy_source(source, copy)
        adapter = load_adapter(copy, arch)
        config = AdapterConfig.read(copy)
        _check_finite(adapter, source)
        _check_unembedding(copy / WEIGHTS_FILE, source, base, tied=arch.tie_embeddings)
    save_adapter(directory, adapter, base_model)
    write_manifest(directory)
    spec = adapter.spec
    lora = LoraConfig(
        rank=spec.rank,
        train_unembed=spec.train_unembed,
        train_mlp=spec.train_mlp,
        train_attn=spec.train_attn,
    )
    return ImportedAdapter(lora, spec.scale, config.declared_base)


def _copy_source(source: Path, copy: Path) -> None:
    if source.is_symlink() or not source.is_dir():
        raise InvalidInput(
            f"{source} is not a directory; pass the directory of a PEFT adapter itself, not a link to it"
        )
    for name, maximum in ((CONFIG_FILE, MAX_CONFIG_BYTES), (WEIGHTS_FILE, MAX_WEIGHTS_BYTES)):
        with _open_regular(source / name) as file, (copy / name).open("xb") as target:
            size = os.fstat(file.fileno()).st_size
            if size > maximum:
                raise InvalidInput(f"{source / name} has {size} bytes, and at most {maximum} are supported")
            shutil.copyfileobj(file, target, length=1 << 20)


def _open_regular(path: Path) -> BinaryIO:
    """Opens a regular file, not a link or device; checked again after opening, so it cannot be swapped."""
    if path.is_symlink():
        raise InvalidInput(
            f"{path} is a link, and links are not followed; copy the adapter with its content first (cp -rL)"
        )
    # Opening a pipe must not block.
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        reject_pickle(path.parent)
        raise InvalidInput(f"{path.parent} is not a PEFT adapter: it has no {path.name}") from None
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidInput(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def _check_finite(adapter: Adapter, source: Path) -> None:
    if not bool(torch.isfinite(adapter.params).all()):
        raise InvalidInput(
            f"adapter {source} has weights that are not finite; import an earlier checkpoint of it"
        )


def _check_unembedding(weights: Path, source: Path, base: Path, *, tied: bool) -> None:
    """Raises ``InvalidInput`` for an adapter with its own unembedding, unless that is the base model's."""
    with safe_open(weights, framework="pt") as file, ExitStack() as files:
        included = [name for name in file.keys() if name in UNEMBED_BASE_NAMES]  # noqa: SIM118 -- no mapping
        if not included:
            return
        theirs = file.get_tensor(included[0])
        stored = StoredTensors(base, files)
        ours = stored.read("embed_tokens.weight" if tied else "lm_head.weight", tuple(theirs.shape))
        # Either side can be rounded to a narrower type.
        if not (torch.equal(ours.to(theirs.dtype), theirs) or torch.equal(theirs.to(ours.dtype), ours)):
            raise InvalidInput(
                f"adapter {source} has its own unembedding ({included[0]}), which is not the base model's; import "
                "it with the base it was trained on, or save it with save_embedding_layers=False"
            )
