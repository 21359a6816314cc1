from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex._wire.sse import LONGEST_EVENT, EventParser, ServerSentEvent

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


def test_an_event_that_never_ends_is_refused() -> None:
    parser = EventParser()
    parser.feed(b"data: " + b"x" * (LONGEST_EVENT - 10))
    with pytest.raises(ValueError, match="longer than"):
        parser.feed(b"x" * 10)
