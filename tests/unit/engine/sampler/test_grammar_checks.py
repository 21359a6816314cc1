"""Structured outputs are checked in a process with limits, so that none takes long where others are sampled."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkex.engine.sampler.grammar_checks import GrammarChecker
from tinkex.errors import InvalidInput
from tinkex.types import StructuredOutput

pytest.importorskip("llguidance")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="a server needs a POSIX system"),
]


@pytest.fixture(scope="module")
def checker(tiny_model: Path) -> Iterator[GrammarChecker]:
    opened = GrammarChecker(tiny_model, 512)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutput(regex="yes|no"),
        StructuredOutput(json_schema=True),
        StructuredOutput(json_schema={"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1000}),
        StructuredOutput(
            json_schema={
                "type": "object",
                "properties": {f"p{n}": {"type": "string", "pattern": "^[a-z]{1,20}$"} for n in range(300)},
                "required": [f"p{n}" for n in range(300)],
            }
        ),
        StructuredOutput(grammar='start: "a" | "b" start'),
    ],
)
def test_ordinary_grammars_are_accepted_and_known_afterwards(
    checker: GrammarChecker, wanted: StructuredOutput
) -> None:
    checker.check(wanted)
    assert checker.is_compiled(wanted)


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutput(json_schema={"type": "number", "multipleOf": 9_999_991}),
        StructuredOutput(
            json_schema={"allOf": [{"type": "number", "multipleOf": n} for n in (7, 11, 13, 17, 19, 23)]}
        ),
        StructuredOutput(
            json_schema={
                "type": "object",
                "patternProperties": {f"^a{n}[a-z]*$": {"type": "integer"} for n in range(500)},
            }
        ),
        StructuredOutput(grammar='start: %json {"type": "number", "multipleOf": 9999991}'),
    ],
)
def test_a_grammar_that_takes_long_to_compile_is_rejected_and_the_next_one_is_checked(
    checker: GrammarChecker, wanted: StructuredOutput
) -> None:
    with pytest.raises(InvalidInput, match="too complex"):
        checker.check(wanted)
    assert not checker.is_compiled(wanted)
    checker.check(StructuredOutput(regex="a|b"))


def test_an_invalid_grammar_is_rejected_with_the_reason(checker: GrammarChecker) -> None:
    with pytest.raises(InvalidInput, match="maxLenght"):
        checker.check(StructuredOutput(json_schema={"items": {"maxLenght": 8}}))


def test_a_closed_checker_starts_again_when_it_is_needed(tiny_model: Path) -> None:
    opened = GrammarChecker(tiny_model, 512)
    for text in ("a", "b"):
        opened.check(StructuredOutput(regex=text))
        opened.close()
