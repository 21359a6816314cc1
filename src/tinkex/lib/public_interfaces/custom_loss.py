"""Where official-SDK programs import ``LossHandle`` and ``PerDatumLossFn`` from."""

from tinkex.traced_loss import LossHandle, PerDatumLossFn

__all__ = ["LossHandle", "PerDatumLossFn"]
