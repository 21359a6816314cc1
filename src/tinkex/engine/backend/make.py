"""The backend that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex.engine.backend.seam import Backend
    from tinkex.engine.config import EngineConfig
    from tinkex.engine.model.progress import Progress


def make_backend(
    config: EngineConfig,
    progress: Progress | None,
    on_death: Callable[[], None],
    on_silence: Callable[[str | None], None],
) -> Backend:
    """A backend on the caller's thread, or in a worker process, of which ``on_death`` and ``on_silence`` are told.

    Example:
        >>> backend = make_backend(EngineConfig(worker="process"), None, engine.wake, engine.note_silence)
    """
    if config.worker == "process":
        from tinkex.engine.backend.remote import ProcessBackend

        return ProcessBackend(config, progress, on_death, on_silence)
    from tinkex.engine.backend.local import LocalBackend

    return LocalBackend(config, progress)
