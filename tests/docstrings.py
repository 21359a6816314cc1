"""The code blocks of docstrings."""

from __future__ import annotations

import ast
import re
from textwrap import dedent

__all__ = ["code_blocks"]


def code_blocks(name: str, doc: str) -> list[str]:
    r"""Returns the blocks after ``::`` of a docstring; raises ``SyntaxError`` for one that does not compile.

    >>> code_blocks("close", "Closes it::\n\n    client.close()")
    ['client.close()']
    """
    blocks = [dedent(block) for block in re.findall(r"::\n\n((?:    .*\n?|\n)+)", doc)]
    for block in blocks:
        compile(block, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return blocks
