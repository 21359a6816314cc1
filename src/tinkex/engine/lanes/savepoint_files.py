"""Savepoint files: the exact state of a run, captured before later turns change it, and restored bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.engine.lanes.interface import CorruptState
from tinkex.engine.store import SavepointRow, file_digest

if TYPE_CHECKING:
    from tinkex.engine.model.architecture import Architecture
    from tinkex.engine.trainer.state import TrainState


@dataclass(frozen=True)
class StateCapture:
    """The state of a run after one turn; later turns do not change it."""

    tensors: Mapping[str, Any]
    metadata: Mapping[str, str]


def capture(state: TrainState) -> StateCapture:
    """Capture a state: copies the buffers that later turns write in place, and shares the adapter's, which is copied on write."""
    state.shared = True
    buffers = {"grad": state.grad, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
    tensors = {name: buffer.clone() for name, buffer in buffers.items() if buffer is not None}
    return StateCapture(
        tensors={"params": state.adapter.params, **tensors},
        metadata={"step": str(state.step), "spec": json.dumps(asdict(state.adapter.spec))},
    )


def write(state: StateCapture, file: Path) -> bytes:
    """Write a capture; returns the digest of the file. Raises ``OSError`` if it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(state.tensors), file, metadata=dict(state.metadata))
    except SafetensorError as error:
        raise OSError(str(error)) from error
    return file_digest(file)


def restore(root: Path, savepoint: SavepointRow, arch: Architecture, source: str) -> TrainState:
    """Returns the state in a savepoint file; raises :class:`CorruptState` if the file is missing or has changed."""
    from safetensors import SafetensorError, safe_open

    from tinkex.engine.model.lora import Adapter, LoraLayout, LoraSpec
    from tinkex.engine.trainer.state import TrainState

    path, name = root / savepoint.file, savepoint.file
    try:
        if path.stat().st_size != savepoint.size_bytes or file_digest(path) != savepoint.digest:
            raise CorruptState(f"its savepoint {name} is corrupt")
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Cloned, so that each buffer has torch's alignment, as in the original run.
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 -- no mapping
        spec: LoraSpec = LoraSpec(**json.loads(metadata["spec"]))
        layout = LoraLayout.of(arch, spec)
        if any(tensor.shape != (layout.num_params,) for tensor in tensors.values()):
            raise CorruptState(f"its savepoint {name} belongs to another model than {source}")
        return TrainState(
            adapter=Adapter(spec, layout, tensors["params"]),
            grad=tensors.get("grad"),
            exp_avg=tensors.get("exp_avg"),
            exp_avg_sq=tensors.get("exp_avg_sq"),
            step=int(metadata["step"]),
        )
    except FileNotFoundError:
        raise CorruptState(f"its savepoint {name} is missing") from None
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CorruptState(f"its savepoint {name} cannot be read ({error})") from error
