"""Writes safetensors files tensor by tensor, so that only one is in memory at a time."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkex.engine.model.progress import Progress, report

__all__ = ["ITEM_BYTES", "WeightEntry", "write_weights"]

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element, by the dtype names of the format."""


@dataclass(frozen=True)
class WeightEntry:
    """One tensor to write: its name, dtype and shape, and a function that returns its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: Callable[[], memoryview]

    @property
    def num_bytes(self) -> int:
        """The size in bytes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


def write_weights(
    directory: Path,
    entries: Sequence[WeightEntry],
    *,
    max_shard_bytes: int,
    phase: str,
    progress: Progress | None = None,
) -> None:
    """Writes ``model.safetensors``, or several shards and their index if it would exceed ``max_shard_bytes``.

    A larger tensor gets its own shard.

    Example:
        >>> entry = WeightEntry("norm.weight", "F32", (2,), lambda: np.ones(2, np.float32).data)
        >>> write_weights(Path("model"), [entry], max_shard_bytes=5 << 30, phase="writing weights")
    """
    shards = _shards(entries, max_shard_bytes)
    total = sum(entry.num_bytes for entry in entries)
    done = 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        single = len(shards) == 1
        file_name = "model.safetensors" if single else f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys((entry.name for entry in shard), file_name)
        with (directory / file_name).open("wb") as file:
            file.write(_header(shard))
            for entry in shard:
                written = file.write(entry.content())
                assert written == entry.num_bytes, entry.name
                done += written
                report(progress, phase, done, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        path = directory / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(entries: Sequence[WeightEntry], max_shard_bytes: int) -> list[list[WeightEntry]]:
    shards: list[list[WeightEntry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.num_bytes
    return shards


def _header(entries: Sequence[WeightEntry]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.num_bytes
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format aligns the data to 8 bytes
    return struct.pack("<Q", len(encoded)) + encoded
