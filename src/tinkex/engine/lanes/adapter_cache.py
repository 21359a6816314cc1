"""Immutable adapters of samplers: always on disk, the most recently used in memory.

An unnamed snapshot is written as a PEFT directory before its sampler is returned, so it survives a crash; snapshots of
unchanged weights share one directory. An adapter that is not in memory is loaded when a sample needs it, and verified
against its manifest: corrupt weights are never sampled from.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.errors import Expired

if TYPE_CHECKING:
    from tinkex.engine.model.architecture import Architecture
    from tinkex.engine.model.lora import Adapter


class AdapterCache:
    """The adapters in memory, by directory. Only called on the lane's thread.

    The same directory gives the same object while it is in memory, so samples share the prefix cache.
    """

    def __init__(self, root: Path, max_in_memory: int) -> None:
        self._root = root
        self._max_in_memory = max_in_memory
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()

    def put(self, directory: str, adapter: Adapter) -> None:
        """Cache an adapter that was just written to ``directory``."""
        self._adapters[directory] = adapter
        self._adapters.move_to_end(directory)
        while len(self._adapters) > self._max_in_memory:
            self._adapters.popitem(last=False)

    def get(self, directory: str, arch: Architecture) -> Adapter:
        """Returns the adapter of a directory, from memory or from disk; raises if its files are missing or corrupt."""
        adapter = self._adapters.get(directory)
        if adapter is None:
            from tinkex.engine.model.adapter_files import load_adapter
            from tinkex.engine.trainer.checkpoint import verify_manifest

            path = self._root / directory
            if not path.is_dir():
                raise Expired(
                    "the weights of this sampler were deleted; save them again with save_weights_for_sampler, "
                    "and create a new sampling client."
                )
            verify_manifest(path)
            adapter = load_adapter(path, arch)
        self.put(directory, adapter)
        return adapter

    def drop(self, directory: str) -> None:
        """Drop an adapter whose directory is being deleted."""
        self._adapters.pop(directory, None)
