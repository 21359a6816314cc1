"""The figures of the simulated clusters, from the results of benchmarks/simulate_cluster.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from typing import Any

from scripts.docsite.drawing import COLOURS, Drawing

Rows = Sequence[Mapping[str, Any]]
Points = Sequence[tuple[float, float]]

FRAME = (76.0, 44.0, 470.0, 226.0)
SHORTEST_S = 0.01
"""Shorter waits are drawn as this."""


def draw(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the SVG of every figure by file name."""
    return {
        "scale-waits.svg": waits(results["grid"]),
        "scale-trace.svg": trace(results["trace"]),
        "scale-control.svg": control(results["control"], results["control_plane"]["operation_s"]),
        "scale-scheduler.svg": scheduler([*results["grid"], *results["scheduler"]]),
    }


def waits(rows: Rows) -> str:
    """Draws what a training pass waits, by users per lane, for clusters of different sizes."""
    series = {
        f"{lanes:,} lane{'s' * (lanes > 1)}": [
            (row["users"] / lanes, row["train_wait_p50"])
            for row in rows
            if row["lanes"] == lanes and row["train_wait_p50"]
        ]
        for lanes in sorted({row["lanes"] for row in rows})
    }
    return _plot(
        "The median wait of a training pass",
        "The wait grows with the users per lane, not with the number of lanes. Estimated costs of an H100.",
        ("users per lane", "median wait, seconds (estimate)"),
        (0.8, 120, 0.3, 400),
        ([1, 10, 100], [1, 10, 100]),
        series,
    )


def trace(rows: Rows) -> str:
    """Draws what a request of the trace waits for its place in a batch, by load."""
    series = {
        f"{samplers:,} sampler{'s' * (samplers > 1)}": [
            (row["load"], max(row["sample_wait_p99"], SHORTEST_S))
            for row in rows
            if row["samplers"] == samplers
        ]
        for samplers in sorted({row["samplers"] for row in rows})
    }
    return _plot(
        "The p99 wait for a place in a decode batch",
        "Requests of the Azure conversation trace at loads from 0.5 to 1.1 times the capacity. Estimated costs of an H100.",
        ("load, share of the capacity", "p99 wait, seconds (estimate)"),
        (0.45, 1.15, 0.01, 100),
        ([0.5, 0.8, 0.95, 1.1], [0.01, 0.1, 1, 10, 100]),
        series,
        log_x=False,
    )


def control(rows: Rows, operation_s: float) -> str:
    """Draws how busy the one API process is, by lanes."""
    series = {
        name: [
            (row["lanes"], 100 * (1.0 if row["is_saturated"] else row["control_utilisation"]))
            for row in rows
            if row["workload"] == workload
        ]
        for name, workload in (("training", "mixed"), ("trace", "azure-conv"))
    }
    return _plot(
        "How busy one API process is",
        f"At {1000 * operation_s:.2f} ms of CPU time for an operation, as it was measured.",
        ("lanes", "the API process, percent"),
        (8, 600, 0, 105),
        ([10, 20, 50, 100, 200, 500], [0, 25, 50, 75, 100]),
        series,
        log_y=False,
    )


def scheduler(rows: Rows) -> str:
    """Draws the real time of the scheduler for an operation, by lanes."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["workload"] != "mixed":
            series.setdefault("trace at 0.8", []).append((row["lanes"], row["scheduler_us_per_operation"]))
        elif row["users"] in {10 * row["lanes"], 100 * row["lanes"]}:
            name = f"training, {row['users'] // row['lanes']} users per lane"
            series.setdefault(name, []).append((row["lanes"], row["scheduler_us_per_operation"]))
    return _plot(
        "What the scheduler takes for an operation",
        "CPU time in microseconds: queues, fair shares, turns, placement and routing together.",
        ("lanes", "microseconds for an operation"),
        (0.8, 1300, 20, 500),
        ([1, 10, 100, 1000], [20, 50, 100, 200, 500]),
        series,
    )


def _plot(
    title: str,
    description: str,
    labels: tuple[str, str],
    ends: tuple[float, float, float, float],
    ticks: tuple[Sequence[float], Sequence[float]],
    series: Mapping[str, Points],
    *,
    log_x: bool = True,
    log_y: bool = True,
) -> str:
    drawing = Drawing(760, 330, title, description)
    left, top, width, height = FRAME
    x0, x1, y0, y1 = ends

    def share(value: float, low: float, high: float, *, is_log: bool) -> float:
        if is_log:
            value, low, high = log10(value), log10(low), log10(high)
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + width * share(x, x0, x1, is_log=log_x),
            top + height * (1 - share(y, y0, y1, is_log=log_y)),
        )

    for value in ticks[1]:
        _, y = at(x0, value)
        drawing.line([(left, y), (left + width, y)], width=0.5)
        drawing.text(left - 7, y + 4, f"{value:,g}", size=11, soft=True, anchor="end")
    for value in ticks[0]:
        x, _ = at(value, y0)
        drawing.text(x, top + height + 17, f"{value:,g}", size=11, soft=True, anchor="middle")
    drawing.text(left + width / 2, top + height + 37, labels[0], size=11.5, soft=True, anchor="middle")
    drawing.text(left - 40, top - 16, labels[1], size=11.5, soft=True)
    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        placed = [at(x, y) for x, y in sorted(points)]
        if len(placed) > 1:
            drawing.line(placed, stroke=colour, width=2)
        for x, y in placed:
            drawing.dot(x, y, 3.5, colour)
        drawing.line([(562, 66 + 26 * number), (584, 66 + 26 * number)], stroke=colour, width=3)
        drawing.text(590, 70 + 26 * number, name, size=12)
    return drawing.svg()
