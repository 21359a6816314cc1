"""The documentation site builds without a warning, and nothing in it leads nowhere or elsewhere."""

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
OWN = {"404.html"}


class Page(HTMLParser):
    """What matters of a page: its title, headings, anchors, links and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.title = ""
        self.headings = 0
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self._in_title = False
        self._in_drawing = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self._in_drawing += tag == "svg"
        self._in_title = tag == "title" and not self._in_drawing
        self.headings += tag == "h1"
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") in {"stylesheet", "icon", "preload"}:
            self.loads.append(found["href"])
        elif tag in {"img", "script", "iframe"} and found.get("src"):
            self.loads.append(found["src"])

    def handle_endtag(self, tag: str) -> None:
        self._in_drawing -= tag == "svg"
        if tag == "title":
            self._in_title = False

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Every page of the site by its file."""
    place = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return {path: Page(path.read_text()) for path in sorted(place.rglob("*.html")) if path.name not in OWN}


def test_every_page_has_a_title_and_one_heading(site: dict[Path, Page]) -> None:
    assert len(site) > 60
    for path, page in site.items():
        assert page.title.strip(), path
        assert page.headings == 1, path


def test_every_link_and_image_of_the_site_is_there(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        for target in [*page.links, *page.loads]:
            parts = urlsplit(target)
            if parts.scheme or target.startswith("//"):
                continue
            reached = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert reached.exists(), f"{path.name} leads to {target}"
            if parts.fragment and reached.suffix == ".html" and not parts.fragment.startswith("__"):
                assert unquote(parts.fragment) in site[reached].anchors, f"{path.name} leads to {target}"


def test_nothing_is_loaded_from_elsewhere(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        elsewhere = [
            address for address in page.loads if urlsplit(address).scheme or address.startswith("//")
        ]
        assert not elsewhere, path
    styles = (ROOT / "docs" / "assets" / "site.css").read_text()
    assert "url(" not in styles
    assert "@import" not in styles


def test_the_search_knows_every_page_and_is_part_of_the_site(site: dict[Path, Page]) -> None:
    place = next(path.parent for path in site if path.name == "limits.html")
    index = json.loads((place / "search" / "search_index.json").read_text())
    texts: dict[str, str] = {}
    for entry in index["docs"]:
        page = entry["location"].partition("#")[0]
        texts[page] = texts.get(page, "") + entry["title"] + entry["text"]
    assert set(texts) == {path.relative_to(place).as_posix() for path in site}
    assert "AuthenticationError" in texts["errors.html"]
    assert "set-ttl" in texts["cli.html"]
    own = re.search(r'"search": "([^"]+)"', (place / "index.html").read_text())
    assert own is not None
    assert (place / own[1]).is_file(), "the worker that searches"


def test_the_figures_are_those_their_data_gives() -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts" / "figures"), "--check"], check=True)


def test_every_page_of_docs_can_be_reached_from_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = set(re.findall(r"[\w/-]+\.md", navigation))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not page.startswith("adr/")} <= listed


def test_docstrings_are_shown_as_text_and_code(site: dict[Path, Page]) -> None:
    for path in site:
        if path.parent.name == "api":
            text = path.read_text()
            assert "clients.html" in text, "the navigation"
            assert not re.search(r":(meth|class|func|attr):|::</p>|<p>&gt;&gt;&gt;|<blockquote>", text), path
