"""Docstrings as Markdown: roles become code, ``::`` blocks and doctests become fenced code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:class|meth|func|mod|attr|data|exc):`~?\.?([^`]+)`")
FENCE = "```"


def as_markdown(text: str) -> str:
    r"""Converts a docstring to Markdown, with code blocks and doctests in fences.

    >>> print(as_markdown("See :meth:`close`::\n\n    client.close()"))
    See `close`:
    <BLANKLINE>
    ```python
    client.close()
    ```
    """
    lines = ROLE.sub(r"`\1`", text).splitlines()
    out: list[str] = []
    index = 0
    while index < len(lines):
        line = lines[index]
        if line.lstrip().startswith(">>> "):
            block, index = _until(lines, index, lambda one: not one.strip())
            out += [f"{FENCE}pycon", *_dedent(block), FENCE]
        elif line.rstrip().endswith("::"):
            opening = line.rstrip()[:-1].rstrip()
            if opening.strip(": "):
                out.append(opening)
            indent = len(line) - len(line.lstrip())
            block, index = _until(
                lines,
                index + 1,
                lambda one, i=indent: bool(one.strip()) and len(one) - len(one.lstrip()) <= i,
            )
            out += ["", f"{FENCE}python", *_dedent(block), FENCE, ""]
        else:
            out.append(line)
            index += 1
    return "\n".join(out)


def _until(lines: list[str], start: int, ends: Any) -> tuple[list[str], int]:
    index = start
    while index < len(lines) and not ends(lines[index]):
        index += 1
    return lines[start:index], index


def _dedent(block: list[str]) -> list[str]:
    while block and not block[0].strip():
        block = block[1:]
    while block and not block[-1].strip():
        block = block[:-1]
    margin = min((len(one) - len(one.lstrip()) for one in block if one.strip()), default=0)
    return [one[margin:] for one in block]


class MarkdownDocstrings(Extension):
    """Converts every loaded docstring."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Converts the docstring of a loaded object."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
