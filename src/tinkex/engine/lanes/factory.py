"""Creates the backend that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex.engine.config import EngineConfig
    from tinkex.engine.lanes.interface import Backend
    from tinkex.engine.model.progress import Progress


def make_backend(
    config: EngineConfig,
    progress: Progress | None,
    on_exit: Callable[[], None],
    on_silence: Callable[[str | None], None],
) -> Backend:
    """A backend in this process, or in a worker process with callbacks for its exit and for missing heartbeats.

    Example:
        >>> backend = make_backend(EngineConfig(worker="process"), None, on_exit=loop.wake, on_silence=print)
    """
    if config.worker == "process":
        from tinkex.engine.lanes.worker_process import ProcessBackend

        return ProcessBackend(config, progress, on_exit, on_silence)
    from tinkex.engine.lanes.in_process import LocalBackend

    return LocalBackend(config, progress)
