"""A training state on disk: a PEFT directory, Adam's moments, and a manifest to verify both.

``manifest.json`` lists every file with its SHA-256 and is written last, so a directory without it is incomplete.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tinkex.engine.model.adapter_files import load_adapter, save_adapter
from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.lora import UNEMBED_MODULE, Adapter, LoraSpec
from tinkex.engine.store import MANIFEST_FILE
from tinkex.engine.trainer.state import TrainState
from tinkex.errors import EngineFailure, InvalidInput

__all__ = ["MANIFEST_FILE", "OPTIMIZER_FILE", "load_state", "save_state", "verify_manifest", "write_manifest"]

OPTIMIZER_FILE = "optimizer.safetensors"
_FORMAT = 1


def save_state(
    state: TrainState,
    directory: Path,
    base_model: str,
    *,
    optimizer: bool,
    unembed_path: str = UNEMBED_MODULE,
) -> None:
    """Writes the adapter, with ``optimizer`` also Adam's moments, and then the manifest.

    The accumulated gradient is not part of a checkpoint.

    Example:
        >>> save_state(state, Path("step-10"), "HuggingFaceTB/SmolLM2-135M-Instruct", optimizer=True)
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MANIFEST_FILE).unlink(missing_ok=True)
    (directory / OPTIMIZER_FILE).unlink(missing_ok=True)
    save_adapter(directory, state.adapter, base_model, unembed_path=unembed_path)
    if optimizer:
        moments: dict[str, Tensor] = {}
        if state.exp_avg is not None and state.exp_avg_sq is not None:
            moments = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
        save_file(moments, directory / OPTIMIZER_FILE, metadata={"type": "adamw", "step": str(state.step)})
    write_manifest(directory)


def load_state(state: TrainState, directory: Path, arch: Architecture, *, optimizer: bool) -> None:
    """Replaces the state by a saved one and clears its gradient; without ``optimizer`` Adam starts from zero.

    The checkpoint must have the rank and train flags of the state. If it cannot be loaded, the state does not change.

    Example:
        >>> load_state(state, Path("step-10"), model.arch, optimizer=True)
    """
    verify_manifest(directory)
    adapter = load_adapter(directory, arch)
    _check_same_spec(directory, saved=adapter.spec, wanted=state.adapter.spec)
    exp_avg, exp_avg_sq, step = _read_moments(directory, adapter) if optimizer else (None, None, 0)
    state.adapter = Adapter(
        replace(adapter.spec, seed=state.adapter.spec.seed), adapter.layout, adapter.params
    )
    state.grad = None
    state.exp_avg, state.exp_avg_sq, state.step = exp_avg, exp_avg_sq, step
    state.shared = False


def write_manifest(directory: Path) -> None:
    """Writes the manifest of a directory: fsyncs its files, then records the size and SHA-256 of each.

    Example:
        >>> write_manifest(Path("imported-adapter"))
    """
    files = {}
    for path in sorted(p for p in directory.iterdir() if p.is_file() and p.name != MANIFEST_FILE):
        _fsync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    partial = directory / f"{MANIFEST_FILE}.part"
    partial.write_text(json.dumps({"format": _FORMAT, "files": files}, indent=2) + "\n", encoding="utf-8")
    _fsync(partial)
    partial.replace(directory / MANIFEST_FILE)
    _fsync(directory)


def verify_manifest(directory: Path) -> None:
    """Raises ``EngineFailure`` unless every file exists and matches its manifest byte for byte.

    Example:
        >>> verify_manifest(Path("step-10"))
    """
    manifest = directory / MANIFEST_FILE
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        listed = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except FileNotFoundError:
        raise EngineFailure(
            f"checkpoint {directory} has no {MANIFEST_FILE}, so it is incomplete. Load another checkpoint"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise EngineFailure(
            f"{manifest} cannot be read ({error}), so the checkpoint is corrupt. Load another checkpoint"
        ) from error
    for name, (size, digest) in listed.items():
        path = directory / name
        if not path.is_file():
            raise EngineFailure(
                f"checkpoint {directory} lacks {name}, which its manifest lists. Load another checkpoint"
            )
        try:
            intact = path.stat().st_size == size and _sha256(path) == digest
        except OSError as error:
            raise EngineFailure(
                f"checkpoint file {path} cannot be read ({error}). Load another checkpoint"
            ) from error
        if not intact:
            raise EngineFailure(
                f"checkpoint file {path} is corrupt: it does not match its manifest. Load another checkpoint"
            )


def _check_same_spec(directory: Path, *, saved: LoraSpec, wanted: LoraSpec) -> None:
    if _describe(saved) != _describe(wanted):
        raise InvalidInput(
            f"checkpoint {directory.name!r} has a LoRA adapter with {_describe(saved)}, and this model was created with "
            f"{_describe(wanted)}; create a model with the settings of the checkpoint and load it there"
        )


def _describe(spec: LoraSpec) -> str:
    return (
        f"rank={spec.rank}, train_attn={spec.train_attn}, train_mlp={spec.train_mlp}, "
        f"train_unembed={spec.train_unembed}"
    )


def _read_moments(directory: Path, adapter: Adapter) -> tuple[Tensor | None, Tensor | None, int]:
    path = directory / OPTIMIZER_FILE
    if not path.is_file():
        raise InvalidInput(
            f"checkpoint {directory.name!r} was saved without its optimizer; load it with optimizer=False, "
            "which starts Adam from zero"
        )
    try:
        with safe_open(path, framework="pt") as saved:
            step = int((saved.metadata() or {})["step"])
            names = set(saved.keys())
            # Copies: later changes to the file must not affect the run.
            moments = [saved.get_tensor(name).clone() for name in ("exp_avg", "exp_avg_sq") if name in names]
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise EngineFailure(f"{path} cannot be read ({error}). Load another checkpoint") from error
    if not moments:
        return None, None, step
    if len(moments) != 2 or any(moment.shape != adapter.params.shape for moment in moments):
        raise EngineFailure(f"{path} does not contain the moments of this adapter. Load another checkpoint")
    return moments[0], moments[1], step


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    """Flushes a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
