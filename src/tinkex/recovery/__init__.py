"""Recovery: runs that are corrupted, lost or out of reach go on from a checkpoint.

:class:`RecoveryMonitor` watches runs and has them restarted by a :class:`RecoveryExecutor`, as a
:class:`RecoveryPolicy` says. :func:`resilient_training` does it for a whole training loop.
"""

from __future__ import annotations

from tinkex.errors import RecoveryError
from tinkex.recovery.executor import RecoveryExecutor
from tinkex.recovery.loop import ResilientTraining
from tinkex.recovery.monitor import RecoveryMonitor
from tinkex.recovery.policy import Best, Condition, Recovered, RecoveryPolicy
from tinkex.recovery.resilient import resilient_training
from tinkex.recovery.steps import Step

__all__ = [
    "Best",
    "Condition",
    "Recovered",
    "RecoveryError",
    "RecoveryExecutor",
    "RecoveryMonitor",
    "RecoveryPolicy",
    "ResilientTraining",
    "Step",
    "resilient_training",
]
