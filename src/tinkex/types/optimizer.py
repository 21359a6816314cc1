"""``AdamOptimizerConfig``, ``AdamParams``, ``DimuonOptimizerConfig``, ``DimuonParams``, ``OptimParams``, ``OptimParamsBase``, ``OptimizerConfig``, ``OptimizerConfigBase``, under the path of the official SDK."""

from tinkex.types import (
    AdamOptimizerConfig,
    AdamParams,
    DimuonOptimizerConfig,
    DimuonParams,
    OptimizerConfig,
    OptimizerConfigBase,
    OptimParams,
    OptimParamsBase,
)

__all__ = [
    "AdamOptimizerConfig",
    "AdamParams",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "OptimParams",
    "OptimParamsBase",
    "OptimizerConfig",
    "OptimizerConfigBase",
]
