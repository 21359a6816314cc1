"""The grammar of an answer that may call tools whose calls must be valid: free text, and calls of their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tinkex.engine.api.compatible.chat_template import END_THINK, THINK
from tinkex.engine.api.compatible.forced_calls import call_schema
from tinkex.engine.api.compatible.tool_formats import MISTRAL, PYTHON_TAG, ToolFormat
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.sampler.grammar import JSON_WHITESPACE
from tinkex.engine.sampler.json_bounds import bound_values
from tinkex.engine.sampler.json_keywords import check_keywords
from tinkex.types import StructuredOutput


def strict_calls(
    tools: Sequence[tuple[str, Mapping[str, Any] | None]], tool_format: ToolFormat, tokenizer: EngineTokenizer
) -> StructuredOutput:
    """What an answer must be: text, and calls of the tools, each a name and the schema of its parameters.

    Raises ``ValueError`` for a schema that cannot be honoured.
    """
    schema = call_schema(tools, tool_format)
    StructuredOutput(json_schema=schema)  # raises if it is nested too deeply
    check_keywords(schema)
    body = {**bound_values(schema), "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}
    marks = _Marks(tokenizer)
    end = tokenizer.end_of_turn_id  # which may not be an end of text, which can always follow
    start = "start: answer" if end is None or end in tokenizer.eos_token_ids else f"start: answer <[{end}]>?"
    rules = [start, *_rules(tool_format, marks), r"WS: /[ \n]?/", f"body: %json {json.dumps(body)}"]
    return StructuredOutput(grammar="\n".join(["%llguidance {}", *rules]))


class _Marks:
    """Markers as a grammar refers to them: special tokens are not text."""

    def __init__(self, tokenizer: EngineTokenizer) -> None:
        self._tokenizer = tokenizer

    def special(self, text: str) -> str | None:
        """A special token by its id, or None if the marker is text."""
        token = self._tokenizer.token_id(text)
        return f"<[{token}]>" if token in self._tokenizer.special_token_ids else None

    def __call__(self, text: str) -> str:
        return self.special(text) or json.dumps(text)


def _rules(tool_format: ToolFormat, marks: _Marks) -> Sequence[str]:
    if tool_format.only_at_start:
        tag = marks.special(PYTHON_TAG)
        calls = rf'{f"{tag}? " if tag else ""}body (";" WS body)*'
        start = r"[^{ \t\n]" if tag else r"[^{< \t\n]"
        return [f"answer: TEXT | {calls}", rf"TEXT: /([ \t\n]*{start}(.|\n)*)?/"]
    special = marks.special(tool_format.start)
    trigger = (
        [f"trigger: TEXT {special}"] if special else [f"trigger[lazy]: TEXT {json.dumps(tool_format.start)}"]
    )
    # Markers of thoughts that are special tokens are not part of TEXT.
    thoughts = " | ".join(mark for mark in map(marks.special, (THINK, END_THINK)) if mark)
    before = f"(TEXT ({thoughts}))* " if thoughts else ""
    if tool_format is MISTRAL:
        rules = [f"answer: {before}(TEXT | call)", r'call: trigger WS "[" body ("," WS body)* "]"']
    else:
        assert tool_format.end is not None, "calls within a text have an end"
        rules = [f"answer: {before}call* TEXT", f"call: trigger WS body WS {marks(tool_format.end)}"]
    return [*rules, *trigger, r"TEXT: /(.|\n)*/"]
