"""The tables of docs/scale.md, from the results of benchmarks/simulate_cluster.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the table of every part of the page by the name of its marker."""
    return {
        "grid": _table(
            (
                "lanes",
                "users",
                "trainers busy",
                "samplers busy",
                "pass p50",
                "pass p99",
                "sample p99",
                "Jain",
            ),
            [
                (
                    f"{row['lanes']:,}",
                    f"{row['users']:,}",
                    _percent(row["trainer_utilisation"]),
                    _percent(row["sampler_utilisation"]),
                    _seconds(row["train_wait_p50"]),
                    _seconds(row["train_wait_p99"]),
                    _seconds(row["sample_wait_p99"]),
                    _index(row["jain"]),
                )
                for row in results["grid"]
            ],
        ),
        "trace": _table(
            ("samplers", "load", "requests/s", "batch taken", "p50 wait", "p99 wait"),
            [
                (
                    f"{row['samplers']:,}",
                    f"{row['load']:g}",
                    f"{row['operations_per_s']:,.0f}",
                    _percent(row["batch_occupancy"]),
                    _seconds(row["sample_wait_p50"]),
                    _seconds(row["sample_wait_p99"]),
                )
                for row in results["trace"]
            ],
        ),
        "control": _table(
            (
                "workload",
                "lanes",
                "users",
                "operations/s",
                "API process",
                "of it reports",
                "pass p50",
                "sample p50",
            ),
            [
                (
                    "training" if row["workload"] == "mixed" else "trace at 0.8",
                    f"{row['lanes']:,}",
                    f"{row['users']:,}",
                    f"{row['operations_per_s']:,.0f}",
                    "saturated" if row["is_saturated"] else _percent(row["control_utilisation"]),
                    _percent(row["reporting_share"]),
                    _seconds(row["train_wait_p50"]),
                    _seconds(row["sample_wait_p50"]),
                )
                for row in results["control"]
            ],
        ),
        "machine": _table(
            ("lanes", "users", "trainers busy", "samplers busy", "pass p50", "sample p50", "Jain"),
            [
                (
                    f"{row['lanes']:,}",
                    f"{row['users']:,}",
                    _percent(row["trainer_utilisation"]),
                    _percent(row["sampler_utilisation"]),
                    _seconds(row["train_wait_p50"]),
                    _seconds(row["sample_wait_p50"]),
                    _index(row["jain"]),
                )
                for row in results["machine"]
            ],
        ),
    }


def fill(page: str, results: Mapping[str, Any]) -> str:
    """Returns the page with its tables replaced; each is between ``<!-- NAME -->`` and ``<!-- end -->``."""
    for name, table in tables(results).items():
        start = page.index(f"<!-- {name} -->") + len(f"<!-- {name} -->")
        end = page.index("<!-- end -->", start)
        page = f"{page[:start]}\n\n{table}\n\n{page[end:]}"
    return page


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _index(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value < 1:
        return f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"
