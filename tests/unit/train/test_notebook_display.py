from __future__ import annotations

import re
from pathlib import Path

from tinkex.train import NotebookDisplay


def test_a_run_is_shown_as_a_bar_and_a_growing_curve() -> None:
    shown: list[str] = []
    display = NotebookDisplay(shown.append)
    display.data_read("8 rows <b>")
    display.working("measuring", 1, 4)
    display.created(Path("run-1"))
    display.started(3, 0, "loss")
    for step, loss in ((1, 2.0), (2, 1.0), (3, 0.5)):
        display.stepped(step, {"loss": loss})
    display.evaluated(3, {"loss": 0.7})
    display.saved(3, "tinker://run/weights/final")
    display.finished()
    bars = [re.search(r'value="(\d)" max="3"', html) for html in shown]
    assert [int(bar[1]) for bar in bars if bar is not None] == [0, 1, 2, 3, 3, 3, 3]
    assert "measuring 1/4" in shown[1]
    assert "8 rows &lt;b&gt;" in shown[-1]
    assert "<svg" not in shown[3]
    assert "<svg" in shown[-1]
    assert 'class="eval"' in shown[-1]
    assert "finished" in shown[-1]
    assert "tinker://run/weights/final" in shown[-1]


def test_an_interrupted_run_is_shown_as_stopped() -> None:
    shown: list[str] = []
    display = NotebookDisplay(shown.append)
    display.started(3, 0, "reward")
    display.stepped(1, {"reward": 0.5})
    display.stopping(1)
    assert "1 steps in flight" in shown[-1]
    display.finished()
    assert "stopped" in shown[-1]
