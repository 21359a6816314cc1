from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.api.detokenizer import IncrementalDetokenizer


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    parts, start = [], 0
    for size in sizes:
        parts.append(data[start : start + size])
        start += size
    return [part for part in [*parts, data[start:]] if part]


def text_of(parts: list[bytes], stop: list[str], reason: str) -> str:
    pieces = IncrementalDetokenizer(stop, lambda token: parts[token])
    last = len(parts) - 1
    return "".join(pieces.add(i, reason if i == last else None) for i in range(len(parts)))  # type: ignore[arg-type]


@given(
    st.text(min_size=1),
    st.lists(st.integers(1, 4), max_size=40),
    st.lists(st.text("ab€", min_size=1), max_size=3),
)
def test_the_deltas_concatenate_to_the_text_for_any_token_boundaries(
    text: str, sizes: list[int], stop: list[str]
) -> None:
    data = text.encode("utf-8", "replace")
    assert text_of(cut(data, sizes), stop, "length") == data.decode()


@given(st.text("abN", max_size=30), st.lists(st.integers(1, 3), max_size=40))
def test_the_text_ends_where_the_stop_string_begins(before: str, sizes: list[int]) -> None:
    stop = "END"
    parts = cut((before + stop).encode(), sizes)
    assert text_of(parts, [stop], "stop") == before


def test_a_possible_stop_string_is_buffered_until_it_is_ruled_out() -> None:
    pieces = IncrementalDetokenizer(["stop"], lambda token: [b"a s", b"to", b"re", b"st"][token])
    assert [pieces.add(token, None) for token in (0, 1, 2)] == ["a ", "", "store"]
    assert pieces.add(3, "length") == "st"


def test_the_final_token_is_not_part_of_the_text_but_buffered_text_is() -> None:
    pieces = IncrementalDetokenizer(["xy"], lambda token: [b"ax", b"<end>"][token])
    assert [pieces.add(0, None), pieces.add(1, "stop")] == ["a", "x"]


def test_a_character_is_returned_with_the_token_that_completes_it() -> None:
    pieces = IncrementalDetokenizer(None, lambda token: "€".encode()[token : token + 1])
    assert [pieces.add(token, None) for token in (0, 1, 2)] == ["", "", "€"]
