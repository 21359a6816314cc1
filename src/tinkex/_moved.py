"""Module paths and names of 0.1: each works until 0.3, with a ``DeprecationWarning`` that gives the new one.

An old path resolves to the module at its new place, so both paths give identical objects, and pickles that contain
the old one load.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["MOVED", "RENAMED", "find_moved", "load_moved", "load_renamed"]

MOVED: Mapping[str, str] = {
    "tinkex.added_tokens": "tinkex.tokenizers.added_tokens",
    "tinkex.chat_template": "tinkex.tokenizers.chat_template",
    "tinkex.config_values": "tinkex.config.values",
    "tinkex.credentials": "tinkex.config.credentials",
    "tinkex.custom_loss": "tinkex.losses.custom",
    "tinkex.downloads": "tinkex.checkpoints",
    "tinkex.downloads.checkpoints": "tinkex.checkpoints.download",
    "tinkex.downloads.extraction": "tinkex.checkpoints.extraction",
    "tinkex.downloads.files": "tinkex.checkpoints.files",
    "tinkex.events": "tinkex.observability.events",
    "tinkex.gguf_metadata": "tinkex.tokenizers.gguf_metadata",
    "tinkex.gguf_tokenizer": "tinkex.tokenizers.gguf_tokenizer",
    "tinkex.hub_push": "tinkex.checkpoints.push",
    "tinkex.metrics": "tinkex.observability.metrics",
    "tinkex.regularizers": "tinkex.losses.regularizers",
    "tinkex.regularizers.distributions": "tinkex.losses.regularizers.distributions",
    "tinkex.regularizers.norms": "tinkex.losses.regularizers.norms",
    "tinkex.regularizers.pipeline": "tinkex.losses.regularizers.pipeline",
    "tinkex.regularizers.positions": "tinkex.losses.regularizers.positions",
    "tinkex.regularizers.structure": "tinkex.losses.regularizers.structure",
    "tinkex.request_options": "tinkex.config.request_options",
    "tinkex.telemetry": "tinkex.observability.telemetry",
    "tinkex.telemetry.capture": "tinkex.observability.telemetry.capture",
    "tinkex.telemetry.redaction": "tinkex.observability.telemetry.redaction",
    "tinkex.telemetry.reporter": "tinkex.observability.telemetry.reporter",
    "tinkex.terminal": "tinkex.observability.terminal",
    "tinkex.terminal.loading": "tinkex.observability.terminal.loading",
    "tinkex.terminal.plot": "tinkex.observability.terminal.plot",
    "tinkex.terminal.training": "tinkex.observability.terminal.training",
    "tinkex.traced_loss": "tinkex.losses.traced",
    "tinkex.tokenizers.description": "tinkex.tokenizers.tokenizer_config",
    "tinkex.tokenizers.everyday": "tinkex.tokenizers.base",
    "tinkex.tracing": "tinkex.observability.tracing",
    "tinkex.train.notebook": "tinkex.train.run_directory",
    "tinkex.types.settling": "tinkex.types.coercion",
}

RENAMED: Mapping[str, Mapping[str, str]] = {
    "tinkex.config": {"Setting": "ClientSetting"},
    "tinkex.config.settings": {"Setting": "ClientSetting"},
    "tinkex.observability.events": {"RunTroubled": "RunUnhealthy", "Silent": "NullSink", "guarded": "guard"},
    "tinkex.recovery": {"Recovered": "RecoveryResult", "Step": "TrainingStep"},
    "tinkex.recovery.policy": {"Recovered": "RecoveryResult"},
    "tinkex.recovery.steps": {"Step": "TrainingStep"},
    "tinkex.tokenizers": {"forget_tokenizers": "clear_tokenizer_cache"},
    "tinkex.tokenizers.base": {"EverydayTokenizer": "BaseTokenizer"},
    "tinkex.tokenizers.loading": {"forget_tokenizers": "clear_tokenizer_cache"},
    "tinkex.train": {"Report": "TrainingReport", "Watcher": "TrainingCallback"},
    "tinkex.train.loop": {"Watcher": "TrainingCallback"},
    "tinkex.train.report": {"Report": "TrainingReport"},
}
"""Per module, public names of 0.1 and their new names; the module's ``__getattr__`` calls :func:`load_renamed`."""


def load_moved(old: str, *, stacklevel: int) -> ModuleType:
    """Returns the module at the new path of ``old``, and enters it in ``sys.modules`` under ``old`` too."""
    warnings.warn(
        f"{old} is now {MOVED[old]}; the old path is removed in 0.3",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )
    for path, new in MOVED.items():
        # Including submodules: the import system would find their files in the package and load them twice.
        if path == old or path.startswith(f"{old}."):
            sys.modules[path] = import_module(new)
    return sys.modules[old]


def load_renamed(module: str, name: str) -> object:
    """Returns the object that was called ``name`` in 0.1; raises ``AttributeError`` for every other name."""
    new = RENAMED.get(module, {}).get(name)
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(
        f"{module}.{name} is now {new}; the old name is removed in 0.3", DeprecationWarning, stacklevel=3
    )
    value: object = getattr(import_module(module), new)
    return value


def find_moved(name: str) -> ModuleSpec | None:
    """Returns the spec of a moved module; None for every other name."""
    return ModuleSpec(name, MovedLoader()) if name in MOVED else None


class MovedLoader(Loader):
    """Loads a module by its old path, in place of the empty module that the import system creates."""

    def exec_module(self, module: ModuleType) -> None:
        """Enters the module at the new path in ``sys.modules``."""
        load_moved(module.__name__, stacklevel=2)
