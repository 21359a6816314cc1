"""The dashboard for Grafana asks only for metrics and labels that servers have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.unit.engine.api.test_metrics_text import FAMILIES

FILE = Path(__file__).parents[4] / "deploy" / "grafana-dashboard.json"
ADDED_BY_SCRAPERS = {"job", "le"}
SELECTOR = re.compile(r"(tinkex_\w+)(?:\{([^}]*)\})?")


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(FILE.read_text())["panels"]
    return found


def queries() -> Iterator[tuple[str, str]]:
    """Each query with its legend."""
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]


def series(name: str) -> tuple[str, set[str]]:
    """The family of a series, and its labels."""
    family = re.sub(r"_(bucket|sum|count)$", "", name) if name not in FAMILIES else name
    kind, labels = FAMILIES[family]
    assert name == family or kind == "histogram", name
    return family, labels | ADDED_BY_SCRAPERS


def test_queries_name_metrics_and_labels_that_exist() -> None:
    for expression, legend in queries():
        found = SELECTOR.findall(expression)
        assert found, expression
        for name, selector in found:
            _, labels = series(name)
            assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) <= labels, expression
            assert set(re.findall(r"{{(\w+)}}", legend)) <= labels, legend
            for grouped in re.findall(r"by \(([^)]*)\)", expression):
                assert set(re.split(r",\s*", grouped)) <= labels, expression


def test_every_metric_is_shown() -> None:
    shown = {series(name)[0] for expression, _ in queries() for name, _ in SELECTOR.findall(expression)}
    assert shown == FAMILIES.keys()


def test_counters_are_shown_as_rates() -> None:
    for expression, _ in queries():
        for name, _ in SELECTOR.findall(expression):
            family, _ = series(name)
            if FAMILIES[family][0] in {"counter", "histogram"} and family != "tinkex_worker_restarts_total":
                assert re.search(rf"(rate|increase)\({name}", expression), expression


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())
