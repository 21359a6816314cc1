from __future__ import annotations

import io

from tinkex.observability.terminal import TrainingLine, training_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_resumed_run_starts_where_it_stopped_and_names_its_metric() -> None:
    now = [0.0]
    out = io.StringIO()
    line = TrainingLine(10, out, lambda: now[0], first_step=6, label="reward")
    now[0] = 10.0
    line.update(loss=0.25, num_tokens=100)
    assert "step 7/10  reward 0.250  10 tokens/s  30 s left" in out.getvalue()


def test_the_live_line_makes_room_for_other_words() -> None:
    out = Terminal()
    with training_line(2, out) as line:
        line.update(loss=1.0, num_tokens=1)
        line.interrupt()
        assert out.getvalue().endswith("\r\x1b[2K")
        line.update(loss=0.5, num_tokens=1)
    assert "step 2/2" in out.getvalue()
    assert out.getvalue().endswith("\n")


def test_elsewhere_than_on_a_terminal_lines_come_now_and_then() -> None:
    now = [0.0]
    out = io.StringIO()
    line = TrainingLine(100, out, lambda: now[0])
    for _ in range(99):
        now[0] += 1.0
        line.update(loss=1.0, num_tokens=1)
    line.interrupt()
    assert 15 <= out.getvalue().count("\n") <= 25
