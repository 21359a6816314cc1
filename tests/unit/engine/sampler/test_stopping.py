from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.sampler.stopping import MAX_STOP_STRINGS, StopRule
from tinkex.errors import InvalidInput


def rule(stop: object) -> StopRule:
    return StopRule.of(stop, eos_token_ids=[2, 7], vocab_size=512)  # type: ignore[arg-type]


def first_stop(stop_rule: StopRule, pieces: list[bytes]) -> int | None:
    """Index of the piece at which the watch stops."""
    checker = stop_rule.checker(lambda token: pieces[token - 1000])
    return next((index for index in range(len(pieces)) if checker.stops(1000 + index)), None)


def naive_first_stop(strings: list[bytes], pieces: list[bytes]) -> int | None:
    """The same, by looking through everything again after every piece."""
    for index in range(len(pieces)):
        if any(string in b"".join(pieces[: index + 1]) for string in strings):
            return index
    return None


def test_without_stop_the_models_own_end_tokens_stop() -> None:
    assert rule(None) == StopRule(tokens=frozenset({2, 7}))


def test_an_empty_list_never_stops() -> None:
    checker = rule([]).checker(lambda token: b"x")
    assert not any(checker.stops(token) for token in range(512))


def test_end_tokens_stop_also_beside_stop_strings_and_stop_tokens() -> None:
    assert rule("END").tokens == {2, 7}
    assert rule(["END", "\n"]).strings == (b"END", b"\n")
    assert rule([5, 9]).tokens == {2, 5, 7, 9}


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("", "empty string"),
        (["a", ""], "empty string"),
        (["a", 5], "mixes int, str"),
        ([512], "token id 512"),
        ([-1], "token id -1"),
        ([True], "mixes bool"),
        ([1.5], "mixes float"),
        (["\ud800"], "surrogate"),
    ],
)
def test_a_stop_that_makes_no_sense_is_rejected_and_named(stop: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        rule(stop)


def test_more_strings_than_can_be_looked_for_in_time_are_rejected() -> None:
    strings = [f"stop {number}" for number in range(MAX_STOP_STRINGS)]
    assert len(rule(strings + strings).strings) == MAX_STOP_STRINGS
    with pytest.raises(InvalidInput, match=f"{MAX_STOP_STRINGS + 1} strings, and at most {MAX_STOP_STRINGS}"):
        rule([*strings, "one more"])


def test_a_stop_string_is_found_across_token_borders() -> None:
    assert first_stop(rule("stop"), [b"don't s", b"t", b"op", b" now"]) == 2


def test_a_stop_string_is_found_inside_one_token() -> None:
    assert first_stop(rule("b"), [b"xx", b"abc", b"d"]) == 1


def test_a_stop_string_is_found_when_its_character_is_split_between_tokens() -> None:
    euro = "€".encode()
    assert first_stop(rule("€"), [b"5 ", euro[:1], euro[1:2], euro[2:], b"!"]) == 3


def test_a_stop_string_may_begin_and_end_in_the_middle_of_tokens_that_split_characters() -> None:
    euro, smile = "€".encode(), "😀".encode()
    pieces = [b"a" + euro[:1], euro[1:] + b"b" + smile[:2], smile[2:], b"c"]
    assert first_stop(rule("€b"), pieces) == 1
    assert first_stop(rule("b😀"), pieces) == 2
    assert first_stop(rule("😀c"), pieces) == 3
    assert first_stop(rule("😁"), pieces) is None


def test_an_incomplete_utf8_sequence_is_not_the_character() -> None:
    assert first_stop(rule("é"), [b"\xc3", b"\xc3", b"\xa9"]) == 2
    assert first_stop(rule("é"), [b"\xc3", b"e", b"\xa9"]) is None


def test_a_false_start_does_not_hide_a_stop_string() -> None:
    assert first_stop(rule("aab"), [b"a", b"a", b"a", b"b"]) == 3


def test_a_token_without_bytes_changes_nothing() -> None:
    assert first_stop(rule("ab"), [b"a", b"", b"b"]) == 2


def test_sequences_of_one_request_are_watched_apart() -> None:
    stop_rule = rule("ab")
    pieces = {1000: b"a", 1001: b"b"}
    one, other = stop_rule.checker(pieces.__getitem__), stop_rule.checker(pieces.__getitem__)
    assert not one.stops(1000)
    assert not other.stops(1001)
    assert one.stops(1001)


def test_stop_strings_are_found_in_the_tokens_of_a_real_tokenizer(tokenizer: EngineTokenizer) -> None:
    tokens = tokenizer.encode("Das kostet 5 € – nicht mehr.", add_special_tokens=False)
    for stop in ["€", "5 €", " – n", "mehr.", "t"]:
        checker = rule(stop).checker(lambda token: tokenizer.decode_bytes([token]))
        at = next(index for index, token in enumerate(tokens) if checker.stops(token))
        assert stop.encode() in tokenizer.decode_bytes(tokens[: at + 1])
        assert stop.encode() not in tokenizer.decode_bytes(tokens[:at])


@settings(deadline=None)
@given(
    text=st.text(alphabet="ab€😀\n", max_size=40),
    stops=st.lists(st.text(alphabet="ab€😀\n", min_size=1, max_size=5), min_size=1, max_size=3),
    data=st.data(),
)
def test_the_watch_agrees_with_a_search_through_everything(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    strings = [stop.encode() for stop in stops]
    assert first_stop(rule(stops), pieces) == naive_first_stop(strings, pieces)


@settings(deadline=None)
@given(
    pieces=st.lists(st.binary(max_size=4), max_size=12),
    strings=st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_watch_is_exact_on_any_bytes(pieces: list[bytes], strings: list[bytes]) -> None:
    assert first_stop(StopRule(strings=tuple(strings)), pieces) == naive_first_stop(strings, pieces)
