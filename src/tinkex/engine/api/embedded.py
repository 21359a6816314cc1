"""The engine inside the user's own process: the same application, called directly, without a socket."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from starlette.types import ASGIApp

from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig, chosen_data_dir, chosen_models, tinkex_home
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
        """Give the engine back; it stops when the last caller has done so."""
        with _lock:
            self.users -= 1
            if self.users > 0 or _engines.get(self.data_dir) is not self:
                return
            del _engines[self.data_dir]
        self.engine.close()


def open_embedded(
    home: Path | None = None,
    models: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    at_exit: Callable[[Callable[[], None]], object] = atexit.register,
) -> EmbeddedEngine:
    """The engine of this process for a home directory, started at the first call.

    ``models`` maps served names to sources; without it ``$TINKEX_MODELS`` says which, and without that the default
    model is served. Any local model directory can also be named directly. Models are loaded when they are first used, and
    ``progress`` is told what that takes. ``at_exit`` is given what closes the engine when the program ends without
    having done so.

    Example:
        >>> embedded = open_embedded(Path("~/.tinkex").expanduser())
        >>> transport = LocalTransport(embedded.app, embedded.api_key)
    """
    chosen = dict(parse_model_flag(flag) for flag in chosen_models()) if models is None else models
    config = EngineConfig(
        home=home or tinkex_home(),
        data_dir=chosen_data_dir() if home is None else None,
        models=chosen,
        auth=False,
        any_directory=True,
    )
    key = config.engine_dir.resolve()
    with _lock:
        known = _engines.get(key)
        if known is None:
            engine = Engine(config, progress)
            engine.start()
            known = _engines[key] = EmbeddedEngine(build_app(engine), engine, key)
            # A second time is harmless: nothing is left to close then.
            at_exit(_close_all)
        elif chosen:
            known.engine.models.add(chosen)
        known.users += 1
        return known


def _close_all() -> None:
    with _lock:
        engines = list(_engines.values())
        _engines.clear()
    for embedded in engines:
        embedded.engine.close()
