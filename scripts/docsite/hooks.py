"""MkDocs hooks: pages from outside docs/, links between pages, inline figures.

The site includes ARCHITECTURE.md, CONTRIBUTING.md, CHANGELOG.md and the examples, with links rewritten to pages of the site.
Links to files that are not pages become plain text.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
INCLUDED = {
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "examples/index.md": "examples/README.md",
}
"""Page of the site → file of the repository."""
SOURCES = dict(INCLUDED)
LINK = re.compile(r"(?<!\!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s#]+)\)")
TABLE = re.compile(r"<!-- performance: (.+?) -->")
FIGURE = re.compile(r'<img alt="([^"]*)" src="([^"]*figures/[\w-]+\.svg)"\s*/?>')


def on_config(config: Any) -> Any:
    """Adds all ADRs to the navigation."""
    decisions = sorted(path.name for path in (ROOT / "docs" / "adr").glob("*.md"))
    for section in config["nav"]:
        for entries in section.values():
            if isinstance(entries, list):
                for entry in entries:
                    if isinstance(entry, dict) and entry.get("Decisions") == "adr":
                        entry["Decisions"] = [f"adr/{name}" for name in decisions]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages from outside docs/."""
    for page, source in INCLUDED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for program in sorted((ROOT / "examples").glob("*.py")):
        page = f"examples/{program.stem}.md"
        SOURCES[page] = f"examples/{program.name}"
        files.append(File.generated(config, page, content=example_page(program)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links between files of the repository to links between pages."""
    uri = page.file.src_uri
    markdown = TABLE.sub(lambda match: performance_table(match[1]), markdown)
    source = SOURCES.get(uri, f"docs/{uri}")
    fences = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part
        if part.startswith("```")
        else IMAGE.sub(lambda m: _image(m, source, uri), LINK.sub(lambda m: _link(m, source, uri), part))
        for part in fences
    )


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Inlines SVG figures, so that they use the colours of the theme."""

    def inline(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.dest_uri), match[2]))
        svg = (ROOT / "docs" / path).read_text()
        return f'<span class="figure">{svg[svg.index("<svg") :]}</span>'

    return FIGURE.sub(inline, html)


def performance_table(start: str) -> str:
    """Returns the table of docs/performance.md whose first cell starts with this text, so that numbers have one source."""
    tables = re.findall(r"^(?:\|.*\n)+", (ROOT / "docs" / "performance.md").read_text(), re.MULTILINE)
    for table in tables:
        if table.startswith(f"| {start}"):
            return table
    raise SystemExit(f"docs/performance.md has no table that starts with {start!r}")


def example_page(program: Path) -> str:
    """Returns the page of an example: its docstring, its command and its code."""
    text = program.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    first, _, rest = docstring.partition("\n")
    command = f"```bash\npython examples/{program.name}\n```"
    return f"# {program.stem}\n\n**{first}**\n{rest}\n\n{command}\n\n```python\n{text}```\n\n[All examples](README.md)\n"


def _link(match: re.Match[str], source: str, uri: str) -> str:
    text, target, anchor = match[1], match[2], match[3] or ""
    if "://" in target or target.startswith("mailto:"):
        return match[0]
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    page = _page_of(file)
    if page is None:
        return text
    return f"[{text}]({posixpath.relpath(page, posixpath.dirname(uri) or '.')}{anchor})"


def _image(match: re.Match[str], source: str, uri: str) -> str:
    if "://" in match[2]:
        return match[0]
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
    return (
        f"![{match[1]}]({posixpath.relpath(posixpath.relpath(file, 'docs'), posixpath.dirname(uri) or '.')})"
    )


def _page_of(path: str) -> str | None:
    """Returns the page of a file of the repository, or None."""
    for page, source in SOURCES.items():
        if source == path:
            return page
    if path == "README.md":
        return "index.md"
    if path == "docs/adr":
        return f"adr/{min(path.name for path in (ROOT / 'docs' / 'adr').iterdir())}"
    if path.startswith("docs/") and path.endswith(".md"):
        return path.removeprefix("docs/")
    return None
