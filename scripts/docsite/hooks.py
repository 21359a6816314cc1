"""Hooks of the site's builder: pages from outside docs/, links between all of them, figures that follow the theme.

ARCHITECTURE.md, CONTRIBUTING.md, CHANGELOG.md and the examples stay where a reader of the repository looks for them; the
site shows the same files, with links that lead to pages of the site. Links to files that are no pages become plain text.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
BROUGHT = {
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "examples/index.md": "examples/README.md",
}
"""Pages of the site by the file of the repository they show."""
HOME = dict(BROUGHT)
LINK = re.compile(r"(?<!\!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s#]+)\)")
TABLE = re.compile(r"<!-- README: (.+?) -->")
FIGURE = re.compile(r'<img alt="([^"]*)" src="([^"]*figures/[\w-]+\.svg)"\s*/?>')


def on_config(config: Any) -> Any:
    """Lists the decisions in the navigation, whichever there are."""
    decisions = sorted(path.name for path in (ROOT / "docs" / "adr").glob("*.md"))
    for section in config["nav"]:
        for entries in section.values():
            if isinstance(entries, list):
                for entry in entries:
                    if isinstance(entry, dict) and entry.get("Decisions") == "adr":
                        entry["Decisions"] = [f"adr/{name}" for name in decisions]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that lie outside docs/."""
    for page, source in BROUGHT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for program in sorted((ROOT / "examples").glob("*.py")):
        page = f"examples/{program.stem}.md"
        HOME[page] = f"examples/{program.name}"
        files.append(File.generated(config, page, content=example_page(program)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links between files of the repository into links between pages."""
    uri = page.file.src_uri
    markdown = TABLE.sub(lambda match: readme_table(match[1]), markdown)
    source = HOME.get(uri, f"docs/{uri}")
    fences = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part
        if part.startswith("```")
        else IMAGE.sub(lambda m: _image(m, source, uri), LINK.sub(lambda m: _link(m, source, uri), part))
        for part in fences
    )


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Puts drawings into the page itself, where they take the colours of the theme."""

    def drawn(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.dest_uri), match[2]))
        svg = (ROOT / "docs" / path).read_text()
        return f'<span class="figure">{svg[svg.index("<svg") :]}</span>'

    return FIGURE.sub(drawn, html)


def readme_table(begins: str) -> str:
    """The table of docs/performance.md whose first cell begins with these words; measured numbers are in one place."""
    tables = re.findall(r"^(?:\|.*\n)+", (ROOT / "docs" / "performance.md").read_text(), re.MULTILINE)
    for table in tables:
        if table.startswith(f"| {begins}"):
            return table
    raise SystemExit(f"docs/performance.md has no table that begins with {begins!r}")


def example_page(program: Path) -> str:
    """A page with an example's promise, its command and its code."""
    text = program.read_text()
    promise = ast.get_docstring(ast.parse(text)) or ""
    first, _, rest = promise.partition("\n")
    command = f"```bash\npython examples/{program.name}\n```"
    return f"# {program.stem}\n\n**{first}**\n{rest}\n\n{command}\n\n```python\n{text}```\n\n[All examples](README.md)\n"


def _link(match: re.Match[str], source: str, uri: str) -> str:
    text, target, anchor = match[1], match[2], match[3] or ""
    if "://" in target or target.startswith("mailto:"):
        return match[0]
    reached = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    page = _page_of(reached)
    if page is None:
        return text
    return f"[{text}]({posixpath.relpath(page, posixpath.dirname(uri) or '.')}{anchor})"


def _image(match: re.Match[str], source: str, uri: str) -> str:
    if "://" in match[2]:
        return match[0]
    reached = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
    inside = posixpath.relpath(reached, "docs")
    return f"![{match[1]}]({posixpath.relpath(inside, posixpath.dirname(uri) or '.')})"


def _page_of(path: str) -> str | None:
    """The page that shows a file of the repository, or None if none does."""
    for page, source in HOME.items():
        if source == path:
            return page
    if path == "README.md":
        return "index.md"
    if path == "docs/adr":
        return f"adr/{min(path.name for path in (ROOT / 'docs' / 'adr').iterdir())}"
    if path.startswith("docs/") and path.endswith(".md"):
        return path.removeprefix("docs/")
    return None
