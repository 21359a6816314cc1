"""The base models this engine serves: names in front, one copy of the weights per source behind them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.engine.backend.seam import Backend, ModelFacts
from tinkex.errors import ModelUnavailable, SetupError, UnknownObject

if TYPE_CHECKING:
    from tinkex.engine.config import EngineConfig
    from tinkex.engine.model.catalog import Progress
    from tinkex.engine.model.tokenizer import EngineTokenizer


class Base:
    """One base model: its source, and once it has been loaded what is known of it, also while it is not in memory."""

    def __init__(
        self, source: str, config: EngineConfig, backend: Backend, progress: Progress | None = None
    ) -> None:
        self.source = source
        self._config = config
        self._backend = backend
        self._progress = progress
        self._facts: ModelFacts | None = None
        self._tokenizer: EngineTokenizer | None = None
        self._lock = threading.Lock()
        self._in_memory = False

    @property
    def loaded(self) -> bool:
        """Whether it has been loaded, so that what is asked of it can be checked."""
        return self._facts is not None

    @property
    def facts(self) -> ModelFacts:
        """What is known of it."""
        if self._facts is None:
            raise ModelUnavailable(f"the model {self.source} is not in memory yet; try again in a moment.")
        return self._facts

    @property
    def tokenizer(self) -> EngineTokenizer:
        """The model's own tokenizer; the first call takes a moment."""
        with self._lock:
            if self._tokenizer is None:
                from tinkex.engine.model.tokenizer import EngineTokenizer

                tokenizer = EngineTokenizer(self.facts.directory)
                len(tokenizer.token_bytes)  # made now, and not when the first token is told
                self._tokenizer = tokenizer
            return self._tokenizer

    def load(self) -> None:
        """Bring the weights into memory; belongs to the engine thread, and does nothing the second time."""
        if not self._in_memory:
            self._facts = self._backend.load(self.source)
            self._in_memory = True

    def left_memory(self) -> None:
        """Note that the weights are gone with the worker that held them."""
        self._in_memory = False

    def find_directory(self) -> Path:
        """The model's directory, found (and fetched if need be) without loading the weights."""
        if self._facts is not None:
            return self._facts.directory
        from tinkex.engine.model.catalog import resolve

        return resolve(self.source, self._config.models_home, self._progress)


class ServedModels:
    """Finds the base model behind a name a client uses."""

    def __init__(self, config: EngineConfig, backend: Backend, progress: Progress | None = None) -> None:
        self._config = config
        self._backend = backend
        self._progress = progress
        self._lock = threading.Lock()
        self._by_name: dict[str, Base] = {}
        self._by_source: dict[str, Base] = {}
        if config.models:
            self.add(config.models)
        else:
            from tinkex.engine.model.catalog import DEFAULT_MODEL

            self.add({DEFAULT_MODEL: DEFAULT_MODEL})

    def add(self, models: Mapping[str, str]) -> None:
        """Serve more names; names of one source share its weights."""
        with self._lock:
            for name, source in models.items():
                key = _canonical(source)
                known = self._by_name.get(name)
                if known is not None and known is not self._by_source.get(key):
                    raise SetupError(
                        f"the name {name} already stands for {known.source}; serve {source} under another name."
                    )
                if key not in self._by_source:
                    self._by_source[key] = Base(key, self._config, self._backend, self._progress)
                self._by_name[name] = self._by_source[key]

    @property
    def names(self) -> Sequence[str]:
        """Every served name."""
        with self._lock:
            return list(self._by_name)

    @property
    def bases(self) -> Sequence[Base]:
        """Every base model once."""
        with self._lock:
            return list(self._by_source.values())

    def find(self, name: str) -> Base:
        """The base model of a name, also with a ``:suffix`` (``name:peft:262144``), or given as its directory."""
        with self._lock:
            for candidate in (name, name.split(":", 1)[0]):
                base = self._by_name.get(candidate) or self._by_source.get(_canonical(candidate))
                if base is not None:
                    return base
        if self._config.any_directory and (Path(_canonical(name)) / "config.json").is_file():
            self.add({name: name})
            return self.find(name)
        raise UnknownObject(
            f"this server does not serve a model named {name!r}; it serves: {', '.join(self.names)}. "
            f"To serve it, start with: tinkex serve --model {name}, or give a served model that name with --model {name}=SOURCE."
        )

    def by_source(self, source: str) -> Base:
        """The base model of a source."""
        with self._lock:
            return self._by_source[source]


def _canonical(source: str) -> str:
    """A source, with directories spelled in one way; any text is allowed, names are not paths."""
    try:
        path = Path(source).expanduser()
        return str(path.resolve()) if path.is_dir() else source
    except (OSError, RuntimeError, ValueError):
        return source
