"""The base models this engine serves: several names may share one copy of the weights."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.engine.lanes.interface import Backend, ModelInfo
from tinkex.errors import InvalidInput, ModelUnavailable, SetupError, UnknownObject

if TYPE_CHECKING:
    from tinkex.engine.config import EngineConfig
    from tinkex.engine.model.catalog import ModelDescription, Progress
    from tinkex.engine.model.tokenizer import EngineTokenizer
    from tinkex.engine.sampler.grammar import GrammarCompiler
    from tinkex.engine.sampler.grammar_checks import GrammarChecker
    from tinkex.types import StructuredOutput

_VARIANT = re.compile(r":peft:(\d{1,18})\Z")


class ServedModel:
    """One base model: its source and, once a lane has loaded it, its shape and limits."""

    def __init__(self, source: str, config: EngineConfig, progress: Progress | None = None) -> None:
        self.source = source
        self._config = config
        self._progress = progress
        self._info: ModelInfo | None = None
        self._description: ModelDescription | None = None
        self._tokenizer: EngineTokenizer | None = None
        self._grammars: GrammarCompiler | GrammarChecker | None = None
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

    def describe(self) -> ModelDescription:
        """Its family and context length, which need no weights; the first call may read files."""
        from tinkex.engine.model.catalog import ModelDescription, describe

        if self._info is not None:
            return ModelDescription(self._info.arch.family, self._info.arch.max_context)
        if self._description is None or self._description.max_context_length is None:
            try:
                self._description = describe(self.source, self._config.models_home)
            except (SetupError, OSError, ValueError):
                return ModelDescription()  # the error is raised when the model is used
        return self._description

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

    @property
    def has_tokenizer(self) -> bool:
        """Whether the tokenizer has been read, so that using it takes no time."""
        return self._tokenizer is not None

    @property
    def grammars(self) -> GrammarCompiler | GrammarChecker:
        """Checks structured outputs; the first call takes a moment. A server with a worker process bounds what that costs."""
        if self._config.worker != "thread":
            with self._lock:
                if self._grammars is None:
                    from tinkex.engine.sampler.grammar_checks import GrammarChecker

                    self._grammars = GrammarChecker(self.info.directory, self.info.arch.vocab_size)
                return self._grammars
        tokenizer = self.tokenizer
        with self._lock:
            if self._grammars is None:
                from tinkex.engine.sampler.grammar import GrammarCompiler

                self._grammars = GrammarCompiler(tokenizer, self.info.arch.vocab_size)
            return self._grammars

    def has_compiled(self, wanted: StructuredOutput) -> bool:
        """Whether a structured output was checked before, so that it can be accepted without delay."""
        return self._grammars is not None and self._grammars.is_compiled(wanted)

    def close(self) -> None:
        """End the process that checks structured outputs, if there is one."""
        with self._lock:
            if self._grammars is not None:
                self._grammars.close()

    def load_on(self, backend: Backend) -> None:
        """Load the weights, if they are not loaded there; only called on the thread of the backend's lane."""
        try:
            self._info = backend.load(self.source)
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

    def close(self) -> None:
        """End the processes that check structured outputs."""
        for model in self.all:
            model.close()

    def find(self, name: str) -> ServedModel:
        """The base model of a name, also with a ``:suffix`` (``name:peft:262144``), or given as its directory or GGUF file."""
        with self._lock:
            for candidate in (name, name.split(":", 1)[0]):
                model = self._by_name.get(candidate) or self._by_source.get(_canonical(candidate))
                if model is not None:
                    return model
        if self._config.any_directory and _is_model(Path(_canonical(name))):
            self.add({name: name})
            return self.find(name)
        if self._config.any_directory:
            raise UnknownObject(
                f"there is no model named {name!r} here; there is: {', '.join(self.names)}. Give the directory of a model, a .gguf file, or "
                f"set TINKEX_MODELS={name} to use one of the Hugging Face Hub."
            )
        raise UnknownObject(
            f"this server does not serve a model named {name!r}; it serves: {', '.join(self.names)}. "
            f"To serve it, start with: tinkex serve --model {name}, or give a served model that name with --model {name}=SOURCE."
        )

    def find_for_use(self, name: str) -> ServedModel:
        """The base model of a name in a new request; raises ``InvalidInput`` for a context longer than the model's.

        ``name:peft:32768`` is a model with a context of 32,768 tokens, unless that is the whole name of a served one. Any other
        suffix is rejected, too. A model that is not loaded yet may read files here.
        """
        model = self.find(name)
        base, colon, suffix = name.partition(":")
        if not colon or name in self._by_name or _canonical(name) in self._by_source:
            return model
        found = _VARIANT.fullmatch(f":{suffix}")
        if found is None:
            raise InvalidInput(
                f"{name!r} has the suffix {':' + suffix!r}, which says nothing here; use {base!r}, or {base + ':peft:<n>'!r} for a "
                "context of n tokens."
            )
        context = int(found[1])
        if not 0 < context <= (model.describe().max_context_length or context):
            raise InvalidInput(
                f"{name!r} asks for a context of {context} tokens, and that of this model is "
                f"{model.describe().max_context_length}; use {base!r}, or a context of 1 up to that."
            )
        return model

    def by_source(self, source: str) -> ServedModel:
        """The base model of a source."""
        with self._lock:
            return self._by_source[source]


def context_length(name: str) -> int | None:
    """The context length in the name of a model, or None.

    >>> context_length("Qwen/Qwen3-8B:peft:32768"), context_length("Qwen/Qwen3-8B")
    (32768, None)
    """
    found = _VARIANT.search(name)
    return int(found[1]) if found is not None else None


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file() or (path.suffix == ".gguf" and path.is_file())


def _canonical(source: str) -> str:
    """A source, with directories and GGUF files spelled in one way; any text is allowed, names are not paths."""
    try:
        path = Path(source).expanduser()
        return str(path.resolve()) if path.is_dir() or _is_model(path) else source
    except (OSError, RuntimeError, ValueError):
        return source
