"""The embedded engine: the same ASGI application in the user's process, without a socket."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from starlette.types import ASGIApp

from tinkex.engine.api.app import build_app
from tinkex.engine.api.loopback import close_loopback
from tinkex.engine.config import EngineConfig, data_dir_from_env, models_from_env, tinkex_home
from tinkex.engine.engine import Engine
from tinkex.engine.model.catalog import parse_model_flag
from tinkex.engine.model.progress import Progress

_lock = threading.Lock()
_engines: dict[Path, EmbeddedEngine] = {}


@dataclass
class EmbeddedEngine:
    """A running engine and its ASGI application; one per data directory and process, shared by all callers."""

    app: ASGIApp
    engine: Engine
    data_dir: Path
    users: int = field(default=0)

    @property
    def api_key(self) -> str:
        """A key this engine accepts."""
        return self.engine.api_key

    def close(self) -> None:
        """Release the engine; it stops when the last user has released it."""
        with _lock:
            self.users -= 1
            if self.users > 0 or _engines.get(self.data_dir) is not self:
                return
            del _engines[self.data_dir]
        close_loopback(self.engine)
        self.engine.close()


def open_embedded(
    home: Path | None = None,
    models: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    at_exit: Callable[[Callable[[], None]], object] = atexit.register,
) -> EmbeddedEngine:
    """Returns this process's engine for a home directory, started at the first call.

    ``models`` maps served names to sources; the default is ``$TINKEX_MODELS``, then the default model. Any local model
    directory can also be used by its path. Models are loaded on first use, which calls ``progress``. ``at_exit``
    registers the function that closes the engine at the end of the program.

    Example:
        >>> embedded = open_embedded(Path("~/.tinkex").expanduser())
        >>> transport = LocalTransport(embedded.app, embedded.api_key)
    """
    sources = dict(parse_model_flag(flag) for flag in models_from_env()) if models is None else models
    config = EngineConfig(
        home=home or tinkex_home(),
        data_dir=data_dir_from_env() if home is None else None,
        models=sources,
        auth=False,
        any_directory=True,
    )
    key = config.engine_dir.resolve()
    with _lock:
        embedded = _engines.get(key)
        if embedded is None:
            engine = Engine(config, progress)
            engine.start()
            embedded = _engines[key] = EmbeddedEngine(build_app(engine), engine, key)
            # Registering it again is harmless: there is nothing left to close.
            at_exit(_close_all)
        elif sources:
            embedded.engine.models.add(sources)
        embedded.users += 1
        return embedded


def _close_all() -> None:
    with _lock:
        engines = list(_engines.values())
        _engines.clear()
    for embedded in engines:
        close_loopback(embedded.engine)
        embedded.engine.close()
