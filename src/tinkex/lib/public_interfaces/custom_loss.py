"""Where official-SDK programs import ``LossHandle`` and ``PerDatumLossFn`` from."""

from tinkex.losses.traced import LossHandle, PerDatumLossFn

__all__ = ["LossHandle", "PerDatumLossFn"]
