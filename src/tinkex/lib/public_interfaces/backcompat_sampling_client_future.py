"""Where official-SDK programs import ``BackcompatSamplingClientFuture`` from: what creates a sampling client returns one."""

from tinkex.clients._pending import PendingSamplingClient as BackcompatSamplingClientFuture

__all__ = ["BackcompatSamplingClientFuture"]
