"""What the API pages show of the code: docstrings as Markdown, and what a blocking method returns to its caller."""

from __future__ import annotations

import re
from typing import Any

from griffe import ExprSubscript, Extension, Function, Object

ROLE = re.compile(r":(?:class|meth|func|mod|attr|data|exc):`~?\.?([^`]+)`")
FENCE = "```"


def as_markdown(text: str) -> str:
    r"""The docstring with everything that Markdown would read otherwise put into fences.

    >>> print(as_markdown("See :meth:`close`::\n\n    client.close()"))
    See `close`:
    <BLANKLINE>
    ```python
    client.close()
    ```
    """
    lines = ROLE.sub(r"`\1`", text).splitlines()
    out: list[str] = []
    place = 0
    while place < len(lines):
        line = lines[place]
        if line.lstrip().startswith(">>> "):
            block, place = _until(lines, place, lambda one: not one.strip())
            out += [f"{FENCE}pycon", *_dedented(block), FENCE]
        elif line.rstrip().endswith("::"):
            opening = line.rstrip()[:-1].rstrip()
            if opening.strip(": "):
                out.append(opening)
            indent = len(line) - len(line.lstrip())
            block, place = _until(
                lines,
                place + 1,
                lambda one, i=indent: bool(one.strip()) and len(one) - len(one.lstrip()) <= i,
            )
            out += ["", f"{FENCE}python", *_dedented(block), FENCE, ""]
        else:
            out.append(line)
            place += 1
    return "\n".join(out)


def _until(lines: list[str], start: int, ends: Any) -> tuple[list[str], int]:
    place = start
    while place < len(lines) and not ends(lines[place]):
        place += 1
    return lines[start:place], place


def _dedented(block: list[str]) -> list[str]:
    while block and not block[0].strip():
        block = block[1:]
    while block and not block[-1].strip():
        block = block[:-1]
    margin = min((len(one) - len(one.lstrip()) for one in block if one.strip()), default=0)
    return [one[margin:] for one in block]


class MarkdownDocstrings(Extension):
    """Rewrites every docstring that is loaded, and the return types of methods that are decorated with ``blocking``."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for each object that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
        if isinstance(obj, Function) and any(each.value.name == "blocking" for each in _names(obj)):
            returns = obj.returns
            assert isinstance(returns, ExprSubscript), f"{obj.path} is blocking, and returns no future"
            obj.returns = returns.slice
            obj.decorators = []


def _names(function: Function) -> list[Any]:
    return [each for each in function.decorators if hasattr(each.value, "name")]
