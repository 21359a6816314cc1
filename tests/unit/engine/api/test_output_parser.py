"""Answers are split into reasoning, text and tool calls, the same however they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.api.compatible.output import OutputParser, Part, Reasoning, Text, join_parts
from tinkex.engine.api.compatible.tool_formats import HERMES, LLAMA3, MISTRAL, ToolCall, ToolFormat

pytestmark = pytest.mark.slow

Thinking = Literal["open", "maybe"] | None
CALL = ToolCall("f", '{"a": 1}')
OTHER = ToolCall("g", "{}")

CASES: dict[str, tuple[Thinking, ToolFormat | None, str, Sequence[Part]]] = {
    "text": (None, None, "Hello <think> you", [Text("Hello <think> you")]),
    "thoughts": ("maybe", None, "<think>\nHm.\n</think>\n\nYes", [Reasoning("Hm."), Text("Yes")]),
    "thoughts that the prompt started": ("open", None, "\nHm.</think>Yes", [Reasoning("Hm."), Text("Yes")]),
    "thoughts without end": ("maybe", None, "<think>Hm.\n\nWell", [Reasoning("Hm.\n\nWell")]),
    "no thoughts": ("maybe", None, "\n <thin air", [Text("\n <thin air")]),
    "nothing": ("maybe", HERMES, "", []),
    "hermes": (None, HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [CALL]),
    "hermes after text": (
        None,
        HERMES,
        """Sure. \n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
<tool_call>{"name": "g", "arguments": "{}"}</tool_call>\n""",
        [Text("Sure."), CALL, OTHER],
    ),
    "hermes and text after it": (
        None,
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n Done. ',
        [CALL, Text("Done.")],
    ),
    "hermes without end": (None, HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}', [CALL]),
    "hermes that is not JSON": (
        None,
        HERMES,
        "a <tool_call>f(a=1)</tool_call> b",
        [Text("a <tool_call>f(a=1)</tool_call> b")],
    ),
    "hermes that has no arguments object": (
        None,
        HERMES,
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        [Text('<tool_call>{"name": "f", "arguments": 3}</tool_call>')],
    ),
    "almost hermes": (None, HERMES, "1 <tool_ca", [Text("1 <tool_ca")]),
    "hermes after thoughts": (
        "maybe",
        HERMES,
        '<think>\nHm.\n</think>\n\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
        [Reasoning("Hm."), CALL],
    ),
    "spaces at the end": (None, HERMES, "Yes. \n", [Text("Yes. \n")]),
    "llama3": (None, LLAMA3, ' {"name": "f", "parameters": {"a": 1}}', [CALL]),
    "llama3 with tag": (None, LLAMA3, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [CALL]),
    "llama3 twice": (
        None,
        LLAMA3,
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        [CALL, OTHER],
    ),
    "llama3 text": (None, LLAMA3, 'Say {"name": "f"}', [Text('Say {"name": "f"}')]),
    "llama3 other JSON": (None, LLAMA3, '{"a": NaN}', [Text('{"a": NaN}')]),
    "mistral": (
        None,
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]',
        [CALL, OTHER],
    ),
    "newer mistral": (None, MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', [CALL, OTHER]),
    "mistral after text": (None, MISTRAL, 'Well, [TOOL_CALLS]f{"a": 1}', [Text("Well,"), CALL]),
    "mistral that is none": (None, MISTRAL, "[TOOL_CALLS] no", [Text("[TOOL_CALLS] no")]),
}


def parse(thinking: Thinking, tools: ToolFormat | None, pieces: Sequence[str]) -> list[Part]:
    parser = OutputParser(thinking, tools)
    return join_parts([part for piece in pieces for part in parser.add(piece)] + parser.finish())


@pytest.mark.parametrize("name", CASES)
def test_the_parts_of_an_answer(name: str) -> None:
    thinking, tools, text, expected = CASES[name]
    assert parse(thinking, tools, [text]) == expected


@pytest.mark.parametrize("name", CASES)
def test_the_parts_are_the_same_for_every_way_of_cutting_the_text(name: str) -> None:
    thinking, tools, text, expected = CASES[name]
    assert parse(thinking, tools, list(text)) == expected

    @given(st.lists(st.integers(0, len(text)), max_size=4))
    def check(cuts: list[int]) -> None:
        places = [0, *sorted(cuts), len(text)]
        pieces = [text[start:end] for start, end in pairwise(places)]
        assert parse(thinking, tools, pieces) == expected

    check()


@given(
    st.lists(
        st.sampled_from(
            ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "{", "}", "\n", "a "]
        )
    ),
    st.sampled_from(["open", "maybe", None]),
    st.sampled_from([HERMES, LLAMA3, MISTRAL, None]),
)
def test_any_text_is_parsed_the_same_as_a_whole_and_in_pieces(
    pieces: list[str], thinking: Thinking, tools: ToolFormat | None
) -> None:
    whole = parse(thinking, tools, ["".join(pieces)])
    assert parse(thinking, tools, pieces) == whole
    assert parse(thinking, tools, list("".join(pieces))) == whole


def test_a_forced_answer_is_one_call_or_text_if_it_was_cut_off() -> None:
    parser = OutputParser(None, HERMES, forced=True)
    assert parser.add('{"name": "f", "argum') == []
    assert [*parser.add('ents": {"a": 1}}'), *parser.finish()] == [CALL]
    cut = OutputParser(None, HERMES, forced=True)
    assert [*cut.add('{"name": "f", "argum'), *cut.finish()] == [Text('{"name": "f", "argum')]
    assert not cut.has_calls
