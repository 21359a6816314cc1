"""The backend that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex.engine.backend.seam import Backend
    from tinkex.engine.config import EngineConfig
    from tinkex.engine.model.progress import Progress


def make_backend(config: EngineConfig, progress: Progress | None, on_death: Callable[[], None]) -> Backend:
    """A backend on the caller's thread, or in a worker process; ``on_death`` is called when that has died.

    Example:
        >>> backend = make_backend(EngineConfig(worker="process"), None, on_death=engine.wake)
    """
    if config.worker == "process":
        from tinkex.engine.backend.remote import ProcessBackend

        return ProcessBackend(config, progress, on_death)
    from tinkex.engine.backend.local import LocalBackend

    return LocalBackend(config, progress)
