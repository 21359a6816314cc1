"""The report as an HTML page: complete, self-contained, and safe to open."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tinkex.train.html_report import MAX_POINTS, to_html, write_html
from tinkex.train.packing import pack
from tinkex.train.report import TrainingReport
from tinkex.train.settings import GrpoSettings

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(1)> \x1b[2J\x00 & \udc80 \"'"
SETTINGS = GrpoSettings(
    data=Path("a <b>.jsonl"), output=Path("run"), reward=("r.py:f", "r.py:g=0.5"), columns={"prompt": "x"}
)


@pytest.fixture
def report(tmp_path: Path) -> TrainingReport:
    packing = [pack([[1, 2, 3], [1, 2, 4]]).as_json()]
    steps = [{"step": n, "reward": n / 10, "loss": -0.1, "kl": 0.01 * n, "num_tokens": 9, "packing": packing} for n in range(1, 7)]  # fmt: skip
    return TrainingReport(
        recipe="grpo",
        base_model="tiny/<llama>",
        headline="reward",
        metrics=[{"step": 0, "eval_reward": 0.0}, *steps, {"step": 6, "eval_reward": 0.5}],
        samples=[{"prompt": HOSTILE, "before": "one\ntwo", "after": HOSTILE}],
        checkpoint="tinker://r/weights/final",
        sampler_checkpoint="tinker://r/sampler_weights/final",
        num_examples=9,
        seconds=3.0,
        output=tmp_path,
    )


class Page(HTMLParser):
    """Collects elements, attributes and text, and checks that every element is closed in order."""

    VOID = frozenset({"meta", "line", "polyline", "circle"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def points(self, kind: str) -> list[int]:
        """The number of points of each curve of a kind."""
        return [
            len(given["points"].split())
            for tag, given in self.elements
            if tag == "polyline" and given["class"] == kind
        ]


def test_the_page_shows_curves_samples_settings_and_packing(report: TrainingReport) -> None:
    page = Page(to_html(report, SETTINGS))
    assert page.points("train") == [6, 6, 6], "reward, loss, kl"
    assert page.points("eval") == [2]
    for part in (
        "Fine-tuned tiny/<llama> (GRPO)",
        "6 steps on 9 examples in 3 s",
        "one\ntwo",
        "tinker://r/weights/final",
        "r.py:f\nr.py:g=0.5",
        "6 passes of 2 sequences, 6 tokens; of 36 tokens 24 are different, 12 shared; 36 computed",
        "prompt = x",
    ):
        assert part in page.text


def test_the_page_loads_and_executes_nothing_and_texts_stay_texts(report: TrainingReport) -> None:
    source = to_html(report, SETTINGS)
    page = Page(source)
    assert {tag for tag, _ in page.elements} <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "span", "svg", "line", "text", "polyline",
        "circle", "table", "tr", "th", "td", "pre",
    }  # fmt: skip
    for _, given in page.elements:
        assert not {"src", "href", "srcset", "data", "action", "style"} & set(given)
        assert not [name for name in given if name.startswith("on")]
    assert not re.search(r"https?:|url\(|@import", source)
    assert "default-src 'none'" in source
    assert r"</pre><script>alert(1)</script><img src=x onerror=alert(1)> \x1b[2J\x00 & \udc80" in page.text


def test_the_page_is_a_file_that_any_browser_decodes(report: TrainingReport) -> None:
    file = write_html(report, SETTINGS)
    assert file == report.output / "report.html"
    assert file.read_bytes().decode("utf-8") == to_html(report, SETTINGS)


def test_many_steps_are_drawn_with_few_points_and_one_step_with_one(report: TrainingReport) -> None:
    many = replace(report, metrics=[{"step": n, "reward": n % 7} for n in range(1, 50_001)])
    assert Page(to_html(many, SETTINGS)).points("train") == [MAX_POINTS]
    one = replace(report, metrics=[{"step": 1, "reward": 0.5}], samples=[])
    assert Page(to_html(one, SETTINGS)).points("train") == [1]
