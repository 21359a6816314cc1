"""Recordings of commands on a terminal, as asciicast files, and their drawings."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

COLUMNS, FONT, ROW, LETTER, MARGIN = 120, 11, 16, 6.63, 12
MAX_PAUSE_S = 1.0
"""Longer pauses are shortened in the drawing."""
END_S = 0.2
PAGE = "docs/start.md"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

Event = tuple[float, str]


@dataclass(frozen=True)
class Recording:
    """What a command wrote to a terminal, and when."""

    command: str
    events: Sequence[Event]

    def to_cast(self) -> str:
        """Returns the recording in the asciicast format, version 2."""
        header = {"version": 2, "width": COLUMNS, "height": 40, "command": self.command}
        lines = [json.dumps(header), *(json.dumps([round(at, 3), "o", text]) for at, text in self.events)]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_cast(cls, text: str) -> Recording:
        """Reads a recording."""
        header, *events = (json.loads(line) for line in text.splitlines())
        return cls(header["command"], [(at, shown) for at, _, shown in events])

    @property
    def screen(self) -> list[str]:
        """The lines that stay on the terminal."""
        return _screen(text for _, text in self.events)

    @property
    def live_lines(self) -> list[str]:
        """Every line that was shown at any time, also those that others replaced."""
        text = "".join(text for _, text in self.events)
        pieces = re.split(r"\r|\n|\x1b\[2K", re.sub(r"\x1b\[\?25[lh]|\x1b\[[0-9;]*m|\x1b\[1A", "", text))
        return list(dict.fromkeys(piece.rstrip() for piece in pieces if piece.strip()))


def commands(page: str) -> dict[str, str]:
    r"""Returns the commands of a page that are recorded, by the name of the recording that the page shows after them.

    >>> list(commands("```bash\ntinkex doctor   # checks\n```\n\n![What it prints](figures/terminal/doctor.svg)\n").items())
    [('doctor', 'tinkex doctor')]
    """
    found = re.findall(
        r"```bash\n(tinkex [^\n]*)\n```\n\n!\[[^\]]*\]\([./]*figures/terminal/([\w-]+)\.svg\)", page
    )
    return {name: shlex.join(shlex.split(command, comments=True)) for command, name in found}


def record(command: str, cwd: Path, env: Mapping[str, str], *, until: str | None = None) -> Recording:
    """Runs a command on a terminal; raises ``SystemExit`` if it fails.

    A command is a module and its arguments, or a Python file and its arguments. One that runs until it is stopped gets
    SIGTERM as soon as it has written what the pattern ``until`` matches; the recording ends there.
    """
    terminal, child = pty.openpty()
    began = time.monotonic()
    words = shlex.split(command, comments=True)
    program = [sys.executable, *([] if words[0].endswith(".py") else ["-m"]), *words]
    process = subprocess.Popen(
        program,
        stdin=child,
        stdout=child,
        stderr=child,
        cwd=cwd,
        env={**os.environ, "COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "xterm", **env},
    )
    os.close(child)
    events: list[Event] = []
    pending = b""
    stopping = False
    while True:
        select.select([terminal], [], [])
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # the command has ended
            break
        if not chunk:
            break
        pending += chunk
        try:
            text = pending.decode()
        except UnicodeDecodeError:  # the rest of a character follows
            continue
        if not stopping:
            events.append((time.monotonic() - began, text))
        pending = b""
        if until and not stopping and re.search(until, "".join(text for _, text in events)):
            process.terminate()
            stopping = True
    os.close(terminal)
    if process.wait() != 0:
        raise SystemExit(f"{command} failed:\n" + "".join(text for _, text in events))
    return Recording(command, events)


def _screen(texts: Iterable[str]) -> list[str]:
    """Returns the lines after these texts: carriage returns, cleared lines and cursor movements upwards are applied."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", "".join(texts)):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part in {"\r", "\x1b[2K"}:
            lines[row] = "" if part == "\x1b[2K" else lines[row] + "\r"
        elif part == "\x1b[1A":
            row = max(0, row - 1)
        elif not ESCAPE.fullmatch(part):
            lines[row] = part if lines[row].endswith("\r") else lines[row] + part
    return "\n".join(line.rstrip("\r").rstrip() for line in lines).rstrip("\n").split("\n")


def draw(recording: Recording) -> str:
    """Returns the recording as an animated SVG that ends with what stays on the terminal."""
    frames: list[tuple[float, list[str]]] = [(0.0, [])]
    now = before = 0.0
    shown = ""
    for at, text in recording.events:
        now += min(at - before, MAX_PAUSE_S)
        before = at
        shown += text
        if now - frames[-1][0] >= 0.1:
            frames.append((now, _screen([shown])))
    frames.append((now + END_S, recording.screen))
    rows = max(len(lines) for _, lines in frames) + 1
    width, height = COLUMNS * LETTER + 2 * MARGIN, rows * ROW + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">',
        f"<title>{escape(recording.command)}</title>",
        f'<rect width="{width:g}" height="{height:g}" rx="6" fill="#1b1f24"/>',
        f'<g font-family="ui-monospace, monospace" font-size="{FONT}" fill="#d7dee6" xml:space="preserve">',
        _text(0, f"$ {recording.command}", fill="#7ee0b8"),
    ]
    for row in range(rows - 1):
        parts += _row(row, frames)
    return "\n".join([*parts, "</g>", "</svg>"]) + "\n"


def _row(row: int, frames: Sequence[tuple[float, Sequence[str]]]) -> list[str]:
    """Draws every text that a row has shown, each for its time; the last one stays."""
    parts, since, text = [], 0.0, ""
    for at, lines in frames:
        current = lines[row] if row < len(lines) else ""
        if current == text:
            continue
        if text:
            parts.append(_text(row + 1, text, begin=since, end=at))
        since, text = at, current
    return [*parts, _text(row + 1, text, begin=since)] if text else parts


def _text(
    row: int, text: str, *, begin: float | None = None, end: float | None = None, fill: str = ""
) -> str:
    shown = text if len(text) <= COLUMNS else text[: COLUMNS - 1] + "…"
    colour = f' fill="{fill}"' if fill else ""
    place = f'x="{MARGIN}" y="{MARGIN + row * ROW + FONT}"'
    if begin is None:
        return f"<text {place}{colour}>{escape(shown)}</text>"
    if end is None:  # hidden until then, so that a viewer without animation shows the end
        timing = f'<set attributeName="visibility" to="hidden" begin="0s" end="{begin:.1f}s"/>'
        return f"<text {place}{colour}>{escape(shown)}{timing}</text>"
    timing = f'<set attributeName="visibility" to="visible" begin="{begin:.1f}s" end="{end:.1f}s"/>'
    return f'<text {place}{colour} visibility="hidden">{escape(shown)}{timing}</text>'
