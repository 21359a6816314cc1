"""A curve as text, for terminals and logs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def text_plot(values: Sequence[float], *, height: int = 6, width: int = 60, label: str = "") -> str:
    """Draws a curve with block characters, its range at the left.

    >>> print(text_plot([4.0, 2.0, 1.0], height=2))
    4.00 ┤█
    1.00 ┤█▆▁
         └─── 3 points
    """
    if not values:
        return f"{label}(nothing to plot)"
    points = _resample(values, width)
    low, high = min(points), max(points)
    span = (high - low) or 1.0
    # Every column is at least one eighth high, so that the minimum is visible.
    heights = [1 + round((v - low) / span * (8 * height - 1)) for v in points]
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    margin = max(len(text) for text in labels.values())
    lines = [label] if label else []
    for line in range(height):
        floor = 8 * (height - 1 - line)
        bar = "".join(_EIGHTHS[max(0, min(8, h - floor))] for h in heights)
        lines.append(f"{labels.get(line, ''):>{margin}} ┤{bar}".rstrip())
    lines.append(f"{'':>{margin}} └{'─' * len(points)} {len(values)} points")
    return "\n".join(lines)


def _resample(values: Sequence[float], width: int) -> list[float]:
    """Returns at most ``width`` points, each the mean of its bin."""
    count = len(values)
    if count <= width:
        return [float(v) for v in values]
    edges = [round(i * count / width) for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
