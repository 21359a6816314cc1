"""The report of a run as one HTML file: curves as inline SVG and samples, without scripts or external resources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tinkex.train.packing import describe
from tinkex.train.report import TrainingReport
from tinkex.train.run_directory import write_text
from tinkex.train.settings import Settings

__all__ = ["FILE", "plot_metric", "to_html", "write_html"]

FILE = "report.html"
Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT, MARGIN, LABELS = 640, 200, 12, 70
"""The size of a plot, the space around its curve, and that of the labels at its left, in pixels."""
MAX_POINTS = 1000
"""More are averaged in as many bins."""
HIDDEN = frozenset({"step", "num_tokens", "packing"})
"""What a line of the metrics has besides the metrics of the method."""
CONTROL = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}
"""Control characters other than tab and newline, which HTML does not allow."""

STYLE = """
:root { color-scheme: light dark; --line: #0b6bcb; --eval: #d9480f; --grid: #8884; --box: #8881; }
@media (prefers-color-scheme: dark) { :root { --line: #6cb2ff; --eval: #ff9457; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: currentColor; }
.axis { stroke: var(--grid); } .train { fill: none; stroke: var(--line); stroke-width: 1.5; }
.eval { fill: none; stroke: var(--eval); stroke-width: 1.5; } circle.eval { fill: var(--eval); }
.key-train { color: var(--line); } .key-eval { color: var(--eval); }
table { border-collapse: collapse; width: 100%; table-layout: fixed; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid var(--grid); }
th { width: 9rem; font-weight: 600; } pre, code { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: .9rem; }
.sample { margin: 1rem 0; background: var(--box); } .note { border-left: 4px solid var(--eval); padding-left: .8rem; }
"""


def write_html(report: TrainingReport, settings: Settings) -> Path:
    """Writes ``report.html`` to the directory of the run, and returns its path."""
    file = report.output / FILE
    write_text(file, to_html(report, settings))
    return file


def to_html(report: TrainingReport, settings: Settings) -> str:
    """Returns the report as a complete HTML page. All texts of the model and the data are escaped."""
    title = f"Fine-tuned {report.base_model} ({report.recipe.upper()})"
    result = [("Checkpoint", report.checkpoint), ("Sampler checkpoint", report.sampler_checkpoint)]
    if report.best_step is not None:
        result.insert(0, ("Result", f"after step {report.best_step}, the best evaluation"))
    chosen = {name: value for name, value in settings.as_json().items() if value not in (None, (), {}, "")}
    chosen.pop("output")
    body = [
        f"<h1>{_text(title)}</h1>",
        f"<p>{_text(report.summary)}</p>",
        *(f'<p class="note">{_text(note)}</p>' for note in report.notes),
        "<h2>Curves</h2>",
        *_curves(report),
        "<h2>Samples</h2>",
        *(
            _table([(name.capitalize(), sample[name]) for name in ("prompt", "before", "after")], "sample")
            for sample in report.samples
        ),
        "<h2>Result</h2>",
        _table(result),
        "<h2>Packing</h2>",
        f"<p>{_text(describe(report.packing))}.</p>",
        "<h2>Settings</h2>",
        _table([(name, _plain(value)) for name, value in chosen.items()]),
    ]
    # The policy states what the page is made of: nothing is loaded, nothing is executed.
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title><style>{STYLE}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def _curves(report: TrainingReport) -> Iterator[str]:
    """Yields a plot of every metric, the headline first, each with its evaluations."""
    names = dict.fromkeys(name for line in report.metrics for name in line)
    plotted = dict.fromkeys(
        [report.headline, *(name.removeprefix("eval_") for name in names if name not in HIDDEN)]
    )
    for name in plotted:
        trained, evaluated = _points(report.metrics, name), _points(report.metrics, f"eval_{name}")
        if trained or evaluated:
            yield plot_metric(name, trained, evaluated)


def _points(metrics: Iterable[Mapping[str, Any]], name: str) -> Points:
    return [(float(line["step"]), float(line[name])) for line in metrics if name in line]


def plot_metric(name: str, trained: Points, evaluated: Points) -> str:
    """Returns a heading and a plot of a metric over the steps, as HTML without style."""
    trained = _average(trained)
    every = [*trained, *evaluated]
    (left, right), (low, high) = (_extent(values) for values in zip(*every, strict=True))
    width, height = WIDTH - LABELS - MARGIN, HEIGHT - 3 * MARGIN

    def place(point: tuple[float, float]) -> str:
        x = LABELS + (point[0] - left) / ((right - left) or 1.0) * width
        y = MARGIN + (high - point[1]) / ((high - low) or 1.0) * height
        return f"{x:.1f},{y:.1f}"

    bottom = MARGIN + height
    parts = [
        f'<line class="axis" x1="{LABELS}" y1="{y}" x2="{WIDTH - MARGIN}" y2="{y}"/>'
        for y in (MARGIN, bottom)
    ]
    parts += [
        f'<text x="{LABELS - 8}" y="{y + 4}" text-anchor="end">{value:.4g}</text>'
        for y, value in ((MARGIN, high), (bottom, low))
    ]
    parts += [
        f'<text x="{LABELS}" y="{bottom + 18}">step {left:.0f}</text>',
        f'<text x="{WIDTH - MARGIN}" y="{bottom + 18}" text-anchor="end">step {right:.0f}</text>',
    ]
    for kind, points in (("train", trained), ("eval", evaluated)):
        parts.append(f'<polyline class="{kind}" points="{" ".join(map(place, points))}"/>' if points else "")
    parts += [
        '<circle class="eval" cx="{}" cy="{}" r="3"/>'.format(*place(point).split(",")) for point in evaluated
    ]
    keys = [f'<span class="key-train">— {_text(name)} per step</span>'] if trained else []
    keys += [f'<span class="key-eval">● eval {_text(name)}</span>'] if evaluated else []
    drawing = "".join(parts)
    return (
        f'<p>{" &nbsp; ".join(keys)}</p>\n<svg role="img" aria-label="{_text(name)} over the steps" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}">{drawing}</svg>'
    )


def _average(points: Points) -> Points:
    """Returns at most ``MAX_POINTS`` points, each the mean of its bin.

    >>> len(_average([(float(step), 0.0) for step in range(2500)]))
    834
    """
    size = -(-len(points) // MAX_POINTS)
    bins = [points[first : first + size] for first in range(0, len(points), size or 1)]
    return [(sum(x for x, _ in each) / len(each), sum(y for _, y in each) / len(each)) for each in bins]


def _extent(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _table(rows: Sequence[tuple[str, str]], kind: str = "") -> str:
    cells = "".join(
        f"<tr><th>{_text(name)}</th><td><pre>{_text(value)}</pre></td></tr>" for name, value in rows
    )
    return f'<table class="{kind}">{cells}</table>' if kind else f"<table>{cells}</table>"


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return "\n".join(map(str, value))
    if isinstance(value, dict):
        return "\n".join(f"{name} = {one}" for name, one in value.items())
    return str(value)


def _text(text: str) -> str:
    r"""Escapes a text for HTML; control characters and lone surrogates become visible.

    >>> _text("<b>\x1b[2J")
    '&lt;b&gt;\\x1b[2J'
    """
    return escape(text.translate(CONTROL).encode("utf-8", "backslashreplace").decode("utf-8"))
