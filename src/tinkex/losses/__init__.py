"""User-defined losses: as a function (``custom``), as a graph that the server runs (``traced``), and terms added to them (``regularizers``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex.losses import custom as custom
    from tinkex.losses import regularizers as regularizers
    from tinkex.losses import traced as traced

__all__ = ["custom", "regularizers", "traced"]


def __getattr__(name: str) -> object:
    """Loads a module at its first use."""
    from importlib import import_module

    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
