"""Adapters by value, which trainers send each other, with digests."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.lora import Adapter, LoraLayout, LoraSpec
from tinkex.errors import EngineFailure

__all__ = ["AdapterCopy"]


@dataclass(frozen=True, eq=False)
class AdapterCopy:
    """The weights of a run by value, for a trainer that does not hold the run; ``key`` names the run and their version.

    Example:
        >>> copy = AdapterCopy.of(adapter, "run-1/3")
        >>> torch.equal(copy.adapter(model.arch).params, adapter.params)
        True
    """

    key: str
    spec: LoraSpec
    params: npt.NDArray[np.float32] = field(repr=False)
    digest: bytes

    @classmethod
    def of(cls, adapter: Adapter, key: str) -> AdapterCopy:
        """An adapter as a value; its buffer is not copied here."""
        params = adapter.params.numpy()
        return cls(key, adapter.spec, params, _digest(params))

    def adapter(self, arch: Architecture) -> Adapter:
        """The adapter, in a buffer of its own; raises ``EngineFailure`` if it is not what was sent."""
        # A copy, so that the buffer has torch's alignment, as where the run is.
        params = torch.from_numpy(self.params).clone()
        layout = LoraLayout.of(arch, self.spec)
        if _digest(params.numpy()) != self.digest or params.shape != (layout.num_params,):
            raise EngineFailure(f"the copy of the adapter {self.key} is not what was sent")
        return Adapter(self.spec, layout, params)


def _digest(params: npt.NDArray[np.float32]) -> bytes:
    return hashlib.blake2b(params.data, digest_size=16).digest()
