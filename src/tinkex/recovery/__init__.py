"""Recovery: restarts corrupted, lost or unreachable runs from a checkpoint.

:class:`RecoveryMonitor` polls runs, and a :class:`RecoveryExecutor` restarts them according to a
:class:`RecoveryPolicy`. :func:`resilient_training` does this for a whole training loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.errors import RecoveryError
from tinkex.recovery.executor import RecoveryExecutor
from tinkex.recovery.loop import ResilientTraining
from tinkex.recovery.monitor import RecoveryMonitor
from tinkex.recovery.policy import Best, Condition, RecoveryPolicy, RecoveryResult
from tinkex.recovery.resilient import resilient_training
from tinkex.recovery.steps import TrainingStep

__all__ = [
    "Best",
    "Condition",
    "RecoveryError",
    "RecoveryExecutor",
    "RecoveryMonitor",
    "RecoveryPolicy",
    "RecoveryResult",
    "ResilientTraining",
    "TrainingStep",
    "resilient_training",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Loads a name of 0.1, with a ``DeprecationWarning``."""
        if name.startswith("__"):  # the import system looks up __path__
            raise AttributeError(name)
        from tinkex._moved import load_renamed

        return load_renamed(__name__, name)
