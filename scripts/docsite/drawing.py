"""SVG shapes that are readable on light and dark backgrounds."""

from __future__ import annotations

from html import escape

COLOURS = ("#00897b", "#e65100", "#7e57c2", "#1e78c8")
"""Dark enough for white text, bright enough for a dark page."""

STYLE = """
.tx-ink { fill: #24292f; } .tx-soft { fill: #59636e; } .tx-line { stroke: #8b949e; fill: none; }
.tx-panel { fill: #f3f5f7; stroke: #c4cbd3; }
@media (prefers-color-scheme: dark) {
  .tx-ink { fill: #e6edf3; } .tx-soft { fill: #9da7b1; } .tx-line { stroke: #7d8590; } .tx-panel { fill: #22272e; stroke: #444c56; }
}
"""


class Drawing:
    """Builds an SVG file; later shapes cover earlier ones."""

    def __init__(self, width: float, height: float, title: str, description: str) -> None:
        self._size = (width, height)
        self._title, self._description = title, description
        self._parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        content: str,
        *,
        size: float = 12,
        soft: bool = False,
        anchor: str = "start",
        bold: bool = False,
        fill: str | None = None,
        mono: bool = False,
    ) -> None:
        """Draws text at a position; the default colour is the theme's."""
        style = f'fill="{fill}"' if fill else f'class="{"tx-soft" if soft else "tx-ink"}"'
        weight = ' font-weight="600"' if bold else ""
        family = ' font-family="ui-monospace, monospace"' if mono else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" {style}{weight}{family}>{escape(content)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str | None = None,
        radius: float = 5,
        opacity: float = 1.0,
        tip: str | None = None,
    ) -> None:
        """Draws a filled box, or a panel in the theme's colours."""
        style = f'fill="{fill}"' if fill else 'class="tx-panel"'
        faded = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
        hint = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" {style}{faded}>{hint}</rect>'
        )

    def line(
        self,
        points: list[tuple[float, float]],
        *,
        stroke: str | None = None,
        width: float = 1.2,
        dashed: bool = False,
        arrow: bool = False,
    ) -> None:
        """Draws a line through points; the default colour is the theme's grey."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        style = f'stroke="{stroke}" fill="none"' if stroke else 'class="tx-line"'
        extra = (' stroke-dasharray="4 4"' if dashed else "") + (
            ' stroke-linejoin="round"' if len(points) > 2 else ""
        )
        self._parts.append(f'<polyline points="{path}" {style} stroke-width="{width:g}"{extra}/>')
        if arrow:
            (x0, y0), (x1, y1) = points[-2:]
            length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5 or 1.0
            ux, uy = (x1 - x0) / length, (y1 - y0) / length
            tips = [
                (x1 - 7 * ux - 4 * uy, y1 - 7 * uy + 4 * ux),
                (x1, y1),
                (x1 - 7 * ux + 4 * uy, y1 - 7 * uy - 4 * ux),
            ]
            self.line(tips, stroke=stroke, width=width)

    def dot(self, x: float, y: float, radius: float, fill: str) -> None:
        """Draws a filled circle."""
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}"/>')

    def svg(self) -> str:
        """Returns the SVG file."""
        width, height = self._size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
            f'font-family="system-ui, sans-serif">\n<title>{escape(self._title)}</title>\n'
            f"<desc>{escape(self._description)}</desc>\n<style>{STYLE}</style>\n"
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


def chart(
    drawing: Drawing,
    frame: tuple[float, float, float, float],
    ends: tuple[float, float, float, float],
    labels: tuple[str, str],
    ticks: tuple[list[float], list[float]],
) -> tuple[object, object]:
    """Draws axes in a frame (x, y, width, height) for values (x0, x1, y0, y1); returns the x and y scales."""
    left, top, width, height = frame
    x0, x1, y0, y1 = ends

    def scale_x(value: float) -> float:
        return left + (value - x0) / (x1 - x0) * width

    def scale_y(value: float) -> float:
        return top + height - (value - y0) / (y1 - y0) * height

    for value in ticks[1]:
        drawing.line([(left, scale_y(value)), (left + width, scale_y(value))], width=0.5)
        drawing.text(left - 7, scale_y(value) + 4, f"{value:g}", size=11, soft=True, anchor="end")
    for value in ticks[0]:
        drawing.text(scale_x(value), top + height + 17, f"{value:g}", size=11, soft=True, anchor="middle")
    drawing.text(left + width / 2, top + height + 35, labels[0], size=11.5, soft=True, anchor="middle")
    drawing.text(left - 30, top - 12, labels[1], size=11.5, soft=True)
    return scale_x, scale_y
