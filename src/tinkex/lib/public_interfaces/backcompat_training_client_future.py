"""Where official-SDK programs import ``BackcompatTrainingClientFuture`` from: what creates a training client returns one."""

from tinkex.clients._pending import PendingTrainingClient as BackcompatTrainingClientFuture

__all__ = ["BackcompatTrainingClientFuture"]
