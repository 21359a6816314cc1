"""An answer as it arrives: reasoning, text and tool calls, the same in a stream as in a whole response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tinkex.engine.api.compatible.chat_template import END_THINK, THINK
from tinkex.engine.api.compatible.tool_formats import PYTHON_TAG, ToolCall, ToolFormat


@dataclass(frozen=True)
class Reasoning:
    """Some of the model's thoughts."""

    text: str


@dataclass(frozen=True)
class Text:
    """Some text of the answer."""

    text: str


Part: TypeAlias = Reasoning | Text | ToolCall


class OutputParser:
    r"""Splits an answer into its parts.

    ``thinking`` says whether it starts with thoughts: "open" if the prompt has already started them, "maybe" if the
    answer may, None if they are not separated. With ``tools`` calls are recognised; ``forced`` means that the answer is
    the JSON of one call.

    >>> parser = OutputParser("maybe", None)
    >>> [parser.add("<thi"), parser.add("nk>\nHm.</think>\n\nYes"), parser.finish()]
    [[], [Reasoning(text='Hm.'), Text(text='Yes')], []]
    """

    def __init__(
        self, thinking: Literal["open", "maybe"] | None, tools: ToolFormat | None, *, forced: bool = False
    ) -> None:
        self._stage = {"open": "reasoning", "maybe": "start", None: "text"}[thinking]
        self._tools = tools
        self._forced = forced
        self._buffer = ""
        self._gap = ""
        """White space before what may be a call; part of the text if it is none."""
        self._is_empty = True
        self._strip = thinking is not None
        self.has_calls = False

    def add(self, text: str) -> list[Part]:
        """The parts that are certain with more text."""
        self._buffer += text
        return join_parts(self._take(final=False))

    def finish(self) -> list[Part]:
        """The parts that remain at the end of the answer."""
        return join_parts(self._take(final=True))

    def _take(self, *, final: bool) -> list[Part]:
        parts: list[Part] = []
        while True:
            stage = self._stage
            match stage:
                case "start":
                    self._take_start(final=final)
                case "reasoning":
                    parts += self._take_reasoning(final=final)
                case "text":
                    parts += self._take_text(final=final)
                case _:
                    parts += self._take_calls(final=final)
            if self._stage == stage:
                return parts

    def _take_start(self, *, final: bool) -> None:
        text = self._buffer.lstrip()
        if text.startswith(THINK):
            self._stage, self._buffer = "reasoning", text.removeprefix(THINK)
        elif final or not THINK.startswith(text):
            self._stage, self._strip = "text", False

    def _take_reasoning(self, *, final: bool) -> list[Part]:
        if self._is_empty:
            self._buffer = self._buffer.lstrip("\n")
        thoughts, end, rest = self._buffer.partition(END_THINK)
        if end:
            self._stage, self._buffer, self._is_empty = "text", rest, True
            return _part(Reasoning, thoughts.rstrip("\n"))
        kept = 0 if final else _ambiguous(self._buffer, END_THINK)
        certain = self._buffer[: len(self._buffer) - kept].rstrip("\n")
        self._buffer = self._buffer[len(certain) :] if not final else ""
        self._is_empty = self._is_empty and not certain
        return _part(Reasoning, certain)

    def _take_text(self, *, final: bool) -> list[Part]:
        if self._is_empty and self._strip:
            self._buffer = self._buffer.lstrip("\n")
        if self._forced:
            return self._take_forced(final=final)
        tools = self._tools
        if tools is None:
            text, self._buffer = self._buffer, ""
            self._is_empty = self._is_empty and not text
            return _part(Text, text)
        if tools.only_at_start:
            return self._take_alternative(tools, final=final)
        text, start, rest = self._buffer.partition(tools.start)
        if start:
            self._stage, self._buffer = "calls", rest
            self._gap = text[len(text.rstrip()) :]
            text = text.rstrip()
        else:
            # White space before a call is not part of the text; after a call, only text follows it.
            certain = text if final and not self.has_calls else text.rstrip()
            kept = 0 if final else _ambiguous(certain, tools.start)
            text = certain[: len(certain) - kept].rstrip() if kept else certain
            self._buffer = "" if final else self._buffer[len(text) :]
        if self.has_calls and self._is_empty:
            text = text.lstrip()
        self._is_empty = self._is_empty and not text
        return _part(Text, text)

    def _take_alternative(self, tools: ToolFormat, *, final: bool) -> list[Part]:
        """The answer is either calls or text, which its first characters tell."""
        text = self._buffer.lstrip()
        if self._is_empty and not final and (not text or PYTHON_TAG.startswith(text)):
            return []
        if self._is_empty and (text.startswith((tools.start, PYTHON_TAG))):
            self._stage = "calls"
            return []
        text, self._buffer = self._buffer, ""
        self._is_empty = self._is_empty and not text
        return _part(Text, text)

    def _take_calls(self, *, final: bool) -> list[Part]:
        assert self._tools is not None
        text, end, rest = self._buffer, "", ""
        if self._tools.end is not None:
            text, end, rest = self._buffer.partition(self._tools.end)
        if not end and not final:
            return []
        calls = self._tools.parse(text.strip().removeprefix(PYTHON_TAG))
        self._stage, self._buffer = "text", rest
        if calls is None:  # not a call after all
            start = "" if self._tools.only_at_start else self._gap + self._tools.start
            self._is_empty = False
            return _part(Text, start + text + end)
        self.has_calls, self._is_empty = True, True
        return list(calls)

    def _take_forced(self, *, final: bool) -> list[Part]:
        assert self._tools is not None
        if not final:
            return []
        text, self._buffer = self._buffer, ""
        calls = self._tools.parse(text)
        if calls is None:
            return _part(Text, text)
        self.has_calls = True
        return list(calls)


def join_parts(parts: Sequence[Part]) -> list[Part]:
    """The parts, with those of one kind that follow each other as one.

    >>> join_parts([Text("a"), Text("b")])
    [Text(text='ab')]
    """
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + part.text)
        else:
            joined.append(part)
    return joined


def _part(kind: type[Reasoning | Text], text: str) -> list[Part]:
    return [kind(text)] if text else []


def _ambiguous(text: str, marker: str) -> int:
    """How many characters at the end may be the beginning of a marker.

    >>> _ambiguous("see <tool", "<tool_call>"), _ambiguous("see", "<tool_call>")
    (5, 0)
    """
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
