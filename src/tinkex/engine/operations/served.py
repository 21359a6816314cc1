"""The base models this engine serves: names in front, one copy of the weights per source behind them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.errors import ModelUnavailable, SetupError, UnknownObject

if TYPE_CHECKING:
    from tinkex.engine.config import EngineConfig
    from tinkex.engine.model.catalog import LoadedModel, Progress
    from tinkex.engine.sampler.sampler import Sampler
    from tinkex.engine.trainer.trainer import Trainer

logger = logging.getLogger("tinkex.engine")


class Base:
    """One base model: its source, and once it is loaded the weights with a trainer and a sampler on them."""

    def __init__(self, source: str, config: EngineConfig, progress: Progress | None = None) -> None:
        self.source = source
        self._config = config
        self._progress = progress
        self._loaded: tuple[LoadedModel, Trainer, Sampler] | None = None

    @property
    def loaded(self) -> bool:
        """Whether the weights are in memory."""
        return self._loaded is not None

    @property
    def model(self) -> LoadedModel:
        """Weights, tokenizer and directory."""
        return self._get()[0]

    @property
    def trainer(self) -> Trainer:
        """Trains adapters on these weights."""
        return self._get()[1]

    @property
    def sampler(self) -> Sampler:
        """Samples from these weights."""
        return self._get()[2]

    def load(self) -> None:
        """Bring the weights into memory; belongs to the engine thread, and does nothing the second time."""
        if self._loaded is not None:
            return
        # Math threads that wait spin for microseconds and then sleep. Spinning longer, as is the default, halves the speed
        # as soon as anything else wants a core; sleeping at once costs a sixth on a quiet machine. It counts only
        # before torch is loaded, and what the user has set stands.
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        from tinkex.engine.model.catalog import load_model
        from tinkex.engine.model.progress import report
        from tinkex.engine.model.threads import compute_with_threads
        from tinkex.engine.sampler.sampler import Sampler
        from tinkex.engine.trainer.trainer import Trainer

        if self._config.threads is not None:
            compute_with_threads(self._config.threads)
        loaded = load_model(self.source, self._config.models_home, self._progress)
        trainer = Trainer(
            loaded.transformer,
            max_tokens_per_pass=self._config.max_tokens_per_pass,
            deterministic=self._config.deterministic,
        )
        sampler = Sampler(
            loaded.transformer,
            loaded.tokenizer,
            max_batch=self._config.max_decode_batch,
            kv_budget_bytes=self._config.kv_cache_bytes,
            compute=self._config.sampler_compute,
        )
        logger.info("%s: samples are computed by %s", self.source, sampler.computes_with)
        self._loaded = (loaded, trainer, sampler)
        report(self._progress, "")

    def find_directory(self) -> Path:
        """The model's directory, found (and fetched if need be) without loading the weights."""
        if self._loaded is not None:
            return self._loaded[0].directory
        from tinkex.engine.model.catalog import resolve

        return resolve(self.source, self._config.models_home, self._progress)

    def _get(self) -> tuple[LoadedModel, Trainer, Sampler]:
        if self._loaded is None:
            raise ModelUnavailable(f"the model {self.source} is not in memory yet; try again in a moment.")
        return self._loaded


class ServedModels:
    """Finds the base model behind a name a client uses."""

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        self._config = config
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
                    self._by_source[key] = Base(key, self._config, self._progress)
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
