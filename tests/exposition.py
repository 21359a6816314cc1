"""The text format of Prometheus, read as strictly as a scraper reads it."""

from __future__ import annotations

import re

SERIES = re.compile(
    r'(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>(?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (?P<value>\S+)'
)
KINDS = {"counter", "gauge", "histogram", "summary", "untyped"}


def read_exposition(text: str) -> dict[str, float]:
    """Every series of a page with its value; an ``AssertionError`` names the line that a scraper would reject."""
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    assert text == "" or text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            assert name not in kinds, f"given twice: {line}"
            assert kind in KINDS, line
            kinds[name] = kind
        elif not line.startswith("#"):
            read = SERIES.fullmatch(line)
            assert read is not None, line
            series = line.rpartition(" ")[0]
            assert series not in found, f"given twice: {line}"
            names = [label.partition("=")[0] for label in re.findall(r'\w+="', read["labels"] or "")]
            assert len(names) == len(set(names)), line
            family = re.sub(r"_(bucket|sum|count)$", "", read["name"])
            assert read["name"] in kinds or kinds.get(family) == "histogram", line
            found[series] = float(read["value"])
    return found
