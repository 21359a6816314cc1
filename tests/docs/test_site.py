"""The documentation site builds without warnings, has no broken links and loads nothing from other hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GENERATED = {"404.html"}


class Page(HTMLParser):
    """A parsed page: title, headings, anchors, links and loaded files."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.title = ""
        self.headings = 0
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self._in_title = False
        self._in_svg = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self._in_svg += tag == "svg"
        self._in_title = tag == "title" and not self._in_svg
        self.headings += tag == "h1"
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") in {"stylesheet", "icon", "preload"}:
            self.loads.append(found["href"])
        elif tag in {"img", "script", "iframe"} and found.get("src"):
            self.loads.append(found["src"])

    def handle_endtag(self, tag: str) -> None:
        self._in_svg -= tag == "svg"
        if tag == "title":
            self._in_title = False

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Builds the site and returns its pages by file."""
    directory = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(directory)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return {
        path: Page(path.read_text())
        for path in sorted(directory.rglob("*.html"))
        if path.name not in GENERATED
    }


def test_every_page_has_a_title_and_one_heading(site: dict[Path, Page]) -> None:
    assert len(site) > 60
    for path, page in site.items():
        assert page.title.strip(), path
        assert page.headings == 1, path


def test_every_link_and_image_of_the_site_exists(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        for target in [*page.links, *page.loads]:
            parts = urlsplit(target)
            if parts.scheme or target.startswith("//"):
                continue
            linked = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert linked.exists(), f"{path.name} has a broken link to {target}"
            if parts.fragment and linked.suffix == ".html" and not parts.fragment.startswith("__"):
                assert unquote(parts.fragment) in site[linked].anchors, (
                    f"{path.name} has a broken link to {target}"
                )


def test_nothing_is_loaded_from_other_hosts(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        external = [url for url in page.loads if urlsplit(url).scheme or url.startswith("//")]
        assert not external, path
    styles = (ROOT / "docs" / "assets" / "site.css").read_text()
    assert "url(" not in styles
    assert "@import" not in styles


def test_the_search_index_contains_every_page_and_is_part_of_the_site(site: dict[Path, Page]) -> None:
    directory = next(path.parent for path in site if path.name == "limits.html")
    index = json.loads((directory / "search" / "search_index.json").read_text())
    texts: dict[str, str] = {}
    for entry in index["docs"]:
        page = entry["location"].partition("#")[0]
        texts[page] = texts.get(page, "") + entry["title"] + entry["text"]
    assert set(texts) == {path.relative_to(directory).as_posix() for path in site}
    assert "AuthenticationError" in texts["errors.html"]
    assert "set-ttl" in texts["cli.html"]
    worker = re.search(r'"search": "([^"]+)"', (directory / "index.html").read_text())
    assert worker is not None
    assert (directory / worker[1]).is_file(), "the search worker"


def test_the_figures_are_up_to_date() -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts" / "figures"), "--check"], check=True)


def test_every_page_of_docs_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = set(re.findall(r"[\w/-]+\.md", navigation))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not page.startswith("adr/")} <= listed


def test_docstrings_are_rendered_as_text_and_code(site: dict[Path, Page]) -> None:
    for path in site:
        if path.parent.name == "api":
            text = path.read_text()
            assert "clients.html" in text, "the navigation"
            assert not re.search(r":(meth|class|func|attr):|::</p>|<p>&gt;&gt;&gt;|<blockquote>", text), path
