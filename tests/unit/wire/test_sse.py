from __future__ import annotations

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex._wire.sse import MAX_EVENT_BYTES, EventParser, ServerSentEvent

STREAM = (
    b"event: token\r\ndata: {1}\r\n\r\n: still here\n\ndata:a\ndata: b\nid: 7\n\nevent: alone\n\rdata: x\r\r"
)
EVENTS = [
    ServerSentEvent("token", b"{1}"),
    ServerSentEvent("message", b"a\nb"),
    ServerSentEvent("message", b"x"),
]


@given(st.lists(st.integers(0, len(STREAM))))
def test_events_are_the_same_however_the_stream_is_cut(cuts: list[int]) -> None:
    parser = EventParser()
    edges = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in itertools.pairwise(edges)]
    found = [event for piece in pieces for event in parser.feed(piece)]
    assert found + parser.feed(b"\n") == EVENTS


def test_an_event_that_never_ends_is_rejected() -> None:
    parser = EventParser()
    parser.feed(b"data: " + b"x" * (MAX_EVENT_BYTES - 10))
    with pytest.raises(ValueError, match="longer than"):
        parser.feed(b"x" * 10)


@pytest.mark.slow
def test_empty_lines_of_data_count_towards_the_limit() -> None:
    parser = EventParser()
    pieces = itertools.repeat(b"data\n" * 100_000, MAX_EVENT_BYTES // 100_000 + 1)
    with pytest.raises(ValueError, match="longer than"):
        any(map(parser.feed, pieces))


def test_a_mark_before_the_first_event_does_not_hide_its_name() -> None:
    parser = EventParser()
    pieces = [b"\xef", b"\xbb\xbfevent: acc", b"epted\ndata: 1\n\n"]
    assert [event for piece in pieces for event in parser.feed(piece)] == [ServerSentEvent("accepted", b"1")]


def test_a_long_line_in_small_pieces_is_held_and_not_gone_through_for_each_of_them() -> None:
    parser, searches = EventParser(), 0

    def count(frame: object, event: str, called: object) -> None:
        nonlocal searches
        searches += event == "c_call" and getattr(called, "__name__", "") == "split"

    sys.setprofile(count)
    try:
        held = [parser.feed(b"data: "), *(parser.feed(b"word ") for _ in range(1000))]
        (event,) = parser.feed(b"\n\n")
    finally:
        sys.setprofile(None)
    assert not any(held)
    assert event.data == b"word " * 1000
    assert searches == 1
