"""How values are shown: short reprs, tables in notebooks, and suggestions for misspelt fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["elided", "html_table", "show_fields", "suggestion"]

NUM_SHOWN = 8
NUM_SHOWN_CHARACTERS = 200

ALIASES: Mapping[str, str] = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "epsilon": "eps",
    "max_grad_norm": "grad_clip_norm",
    "clip_norm": "grad_clip_norm",
    "temp": "temperature",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "stop_sequences": "stop",
    "stop_tokens": "stop",
    "r": "rank",
    "lora_rank": "rank",
    "targets": "target_tokens",
    "labels": "target_tokens",
    "mask": "weights",
    "loss_mask": "weights",
    "old_logprobs": "logprobs",
}
"""Names that other libraries use for a field."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns ``; did you mean 'x'?`` for the field that was probably meant, or nothing.

    >>> suggestion("lr", ["learning_rate", "beta1"])
    "; did you mean 'learning_rate'?"
    >>> suggestion("temprature", ["temperature"]), suggestion("colour", ["temperature"])
    ("; did you mean 'temperature'?", '')
    """
    from difflib import get_close_matches

    fields = list(known)
    alias = ALIASES.get(name)
    near = [alias] if alias in fields else get_close_matches(name, fields, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def elided(value: Any) -> str:
    """Returns the repr of a value, with the beginning of long lists and texts only.

    >>> elided(list(range(2000)))
    '[0, 1, 2, 3, 4, 5, 6, 7, … 2000 items]'
    """
    if isinstance(value, list | tuple):
        shown = [elided(item) for item in value[:NUM_SHOWN]]
        if len(value) > NUM_SHOWN:
            shown.append(f"… {len(value)} items")
        elif isinstance(value, tuple):
            return f"({', '.join(shown)}{',' if len(shown) == 1 else ''})"
        return f"[{', '.join(shown)}]"
    if isinstance(value, dict):
        shown = [f"{key!r}: {elided(item)}" for key, item in list(value.items())[:NUM_SHOWN]]
        return "{" + ", ".join([*shown, *([f"… {len(value)} items"] if len(value) > NUM_SHOWN else [])]) + "}"
    if isinstance(value, str | bytes) and len(value) > NUM_SHOWN_CHARACTERS:
        return f"{value[:NUM_SHOWN_CHARACTERS]!r}… ({len(value)} {'bytes' if isinstance(value, bytes) else 'characters'})"
    return repr(value)


def show_fields(value: object, names: Iterable[str]) -> str:
    """Returns a repr with these fields."""
    fields = ", ".join(f"{name}={elided(getattr(value, name))}" for name in names)
    return f"{type(value).__name__}({fields})"


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table for notebooks.

    >>> html_table("Metrics", ["name", "value"], [["loss:sum", 2.5]])[:18]
    '<table><caption>Me'
    """
    from html import escape

    def cells(tag: str, values: Iterable[object]) -> str:
        texts = (f"{one:.4g}" if isinstance(one, float) else str(one) for one in values)
        return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><tr>{cells('th', columns)}</tr>{body}</table>"
