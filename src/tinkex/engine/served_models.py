"""The base models this engine serves: several names may share one copy of the weights."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.engine.lanes.interface import ModelInfo
from tinkex.engine.lanes.lane import Lane
from tinkex.errors import ModelUnavailable, SetupError, UnknownObject

if TYPE_CHECKING:
    from tinkex.engine.config import EngineConfig
    from tinkex.engine.model.catalog import Progress
    from tinkex.engine.model.tokenizer import EngineTokenizer


class ServedModel:
    """One base model: its source and, once a lane has loaded it, its shape and limits."""

    def __init__(self, source: str, config: EngineConfig, progress: Progress | None = None) -> None:
        self.source = source
        self._config = config
        self._progress = progress
        self._info: ModelInfo | None = None
        self._tokenizer: EngineTokenizer | None = None
        self._lock = threading.Lock()

    @property
    def known(self) -> bool:
        """Whether it has been loaded once, so that requests can be validated."""
        return self._info is not None

    @property
    def info(self) -> ModelInfo:
        """Its shape and limits; raises ``ModelUnavailable`` before it has been loaded."""
        if self._info is None:
            raise ModelUnavailable(f"the model {self.source} is not in memory yet; try again in a moment.")
        return self._info

    @property
    def tokenizer(self) -> EngineTokenizer:
        """The model's own tokenizer; the first call takes a moment."""
        with self._lock:
            if self._tokenizer is None:
                from tinkex.engine.model.tokenizer import EngineTokenizer

                tokenizer = EngineTokenizer(self.info.directory)
                len(tokenizer.token_bytes)  # builds the table now instead of with the first token
                self._tokenizer = tokenizer
            return self._tokenizer

    def load_on(self, lane: Lane) -> None:
        """Load the weights on a lane, if they are not loaded there; only called on the lane's thread."""
        try:
            self._info = lane.load(self.source)
        except SetupError as error:
            raise ModelUnavailable(f"the model {self.source} cannot be loaded: {error}") from error

    def find_directory(self) -> Path:
        """The model's directory, downloaded if necessary, without loading the weights."""
        if self._info is not None:
            return self._info.directory
        from tinkex.engine.model.catalog import resolve

        return resolve(self.source, self._config.models_home, self._progress)


class ServedModels:
    """Finds the base model of a name a client uses."""

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        self._config = config
        self._progress = progress
        self._lock = threading.Lock()
        self._by_name: dict[str, ServedModel] = {}
        self._by_source: dict[str, ServedModel] = {}
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
                        f"the name {name} is used for {known.source}; serve {source} under another name."
                    )
                if key not in self._by_source:
                    self._by_source[key] = ServedModel(key, self._config, self._progress)
                self._by_name[name] = self._by_source[key]

    @property
    def names(self) -> Sequence[str]:
        """Every served name."""
        with self._lock:
            return list(self._by_name)

    @property
    def all(self) -> Sequence[ServedModel]:
        """Every base model once."""
        with self._lock:
            return list(self._by_source.values())

    def find(self, name: str) -> ServedModel:
        """The base model of a name, also with a ``:suffix`` (``name:peft:262144``), or given as its directory."""
        with self._lock:
            for candidate in (name, name.split(":", 1)[0]):
                model = self._by_name.get(candidate) or self._by_source.get(_canonical(candidate))
                if model is not None:
                    return model
        if self._config.any_directory and (Path(_canonical(name)) / "config.json").is_file():
            self.add({name: name})
            return self.find(name)
        raise UnknownObject(
            f"this server does not serve a model named {name!r}; it serves: {', '.join(self.names)}. "
            f"To serve it, start with: tinkex serve --model {name}, or give a served model that name with --model {name}=SOURCE."
        )

    def by_source(self, source: str) -> ServedModel:
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
