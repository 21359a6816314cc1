from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import termios

import pytest

from tinkex.observability.terminal import LoadingLine, TrainingLine, training_line


@pytest.fixture(autouse=True)
def with_control_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


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
    now[0] = 600.0
    line.update(loss=0.25, num_tokens=100)
    assert "step 8/10  reward 0.250  0 tokens/s  10 min left" in out.getvalue()


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


def shown_on_a_terminal(columns: int) -> str:
    master, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 10, columns, 0, 0))
    with os.fdopen(child, "w", encoding="utf-8") as stream:
        LoadingLine(stream).show("downloading a model with a long name", 1, 100 << 20)
        line = TrainingLine(100, stream)
        line.update(loss=1.0, num_tokens=100)
        shown = b""
        while b"left" not in shown and b"1.000" not in shown:
            shown += os.read(master, 65536)
    os.close(master)
    return shown.decode()


def test_a_live_line_is_cut_to_the_width_of_the_terminal() -> None:
    _, *lines = shown_on_a_terminal(30).split("\r\x1b[2K")
    assert lines[0] == "downloading a model with a lo"
    assert lines[1].startswith("step 1/100  loss 1.000  "), "there is no room for the bar"
    assert [len(line) for line in lines] == [29, 29], "a longer one would wrap and could not be cleared"
    assert "0 of 100 MB" in shown_on_a_terminal(0), "a terminal that does not say its size"


def test_on_a_terminal_without_control_sequences_each_phase_has_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    shown = shown_on_a_terminal(80)
    assert "\x1b" not in shown
    assert shown.splitlines()[0] == "downloading a model with a long name"
