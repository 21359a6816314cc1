"""Structured outputs: what is accepted, what is rejected by name, and which tokens a state allows."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.sampler.grammar import MAX_COMPILED, MAX_GRAMMAR_BYTES, GrammarCompiler
from tinkex.errors import InvalidInput, Unsupported
from tinkex.types import StructuredOutput

VOCAB = 512


@pytest.fixture(scope="module")
def grammars(tokenizer: EngineTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB)


def accepts(
    grammars: GrammarCompiler, tokenizer: EngineTokenizer, wanted: StructuredOutput, text: str
) -> bool:
    """Whether a whole text, and the end of the sequence after it, are allowed."""
    state = grammars.start(wanted)
    for token in [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_ids[0]]:
        if not state.allowed()[token]:
            return False
        state.advance(token)
    return state.complete


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("wanted", "text", "expected"),
    [
        ({"regex": "[0-9]{3}"}, "123", True),
        ({"regex": "[0-9]{3}"}, "12", False),
        ({"regex": "[0-9]{3}"}, "1234", False),
        ({"regex": "é+"}, "éé", True),
        ({"regex": ""}, "", True),
        ({"json_schema": True}, '{"any": [1, {"x": null}]}', True),
        ({"json_schema": True}, "[1]", False),
        ({"json_schema": PERSON}, '{"name": "Ada", "age": 36}', True),
        ({"json_schema": PERSON}, '{\n  "name": "Ada",\n  "age": 36\n}', True),
        ({"json_schema": PERSON}, '{"name":"Ada","age":36}', True),
        ({"json_schema": PERSON}, '{"name":"Ada"}', False),
        ({"json_schema": PERSON}, '{"name":"Ada","age":36,"more":1}', False),
        ({"json_schema": PERSON}, '{"name":"Ada",      "age":36}', False),
        ({"grammar": 'start: "a" start "b" | "-"'}, "aa-bb", True),
        ({"grammar": 'start: "a" start "b" | "-"'}, "aa-b", False),
    ],
)
def test_exactly_the_texts_of_a_grammar_are_accepted(
    grammars: GrammarCompiler,
    tokenizer: EngineTokenizer,
    wanted: dict[str, Any],
    text: str,
    expected: bool,
) -> None:
    assert accepts(grammars, tokenizer, StructuredOutput(**wanted), text) is expected


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": {"not": {"type": "string"}}}, "not"),
        ({"json_schema": {"items": {"type": "array", "contains": {}}, "type": "array"}}, "contains"),
        ({"json_schema": {"type": "string", "format": "shoe-size"}}, "shoe-size"),
        ({"json_schema": {"type": "text"}}, "text"),
        ({"json_schema": {"properties": {"a": {"maxLenght": 3}}}}, "maxLenght"),
        ({"json_schema": {"type": "string", "nullable": True}}, "nullable"),
        ({"json_schema": {"x-guidance": {"lenient": True}, "uniqueItems": True}}, "x-guidance"),
        ({"json_schema": {"$ref": "#/$defs/missing"}}, "missing"),
        ({"json_schema": {"$ref": "http://127.0.0.1/schema"}}, "127.0.0.1"),
        ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 2}}, "minimum"),
        ({"json_schema": {"type": "string", "pattern": "(?=a)b"}}, "look-ahead"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "a\\1"}, "backreferences"),
        ({"grammar": 'begin: "a"'}, "start"),
        ({"grammar": "start: other"}, "other"),
        ({"grammar": 'start: %json {"uniqueItems": true, "x-guidance": {"lenient": true}}'}, "uniqueItems"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, f"{MAX_GRAMMAR_BYTES:,}"),
        ({"regex": "\ud800"}, "regex"),
        ({"grammar": 'start: x\nx[capture="]", temperature=0.5]: /a+/'}, "temperature"),
    ],
)
def test_what_cannot_be_honoured_is_rejected_with_an_error_that_names_it(
    grammars: GrammarCompiler, wanted: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidInput, match=re.escape(named)) as raised:
        grammars.check(StructuredOutput(**wanted))
    assert f"structured_output.{next(iter(wanted))}" in str(raised.value)


def test_special_tokens_are_not_text(grammars: GrammarCompiler, tokenizer: EngineTokenizer) -> None:
    anything = grammars.start(StructuredOutput(regex="(.|\n)*")).allowed()
    special = tokenizer.special_token_ids
    assert {token for token in special if anything[token]} == set(tokenizer.eos_token_ids)
    assert not anything[tokenizer.vocab_size :].any()


@pytest.mark.parametrize("text", ["a<|im_end|>b", "<|im_end|>", " leading", "two  spaces", "é\u2603"])
def test_prescribed_text_is_written_as_text(
    grammars: GrammarCompiler, tokenizer: EngineTokenizer, text: str
) -> None:
    for wanted in (
        StructuredOutput(json_schema={"const": text}),
        StructuredOutput(regex=re.escape(text)),
        StructuredOutput(grammar=f"start: {json.dumps(text)}"),
    ):
        state, tokens = grammars.start(wanted), list[int]()
        while not state.complete:
            tokens.append(int(np.flatnonzero(state.allowed())[0]))
            state.advance(tokens[-1])
        assert not set(tokens[:-1]) & set(tokenizer.special_token_ids)
        written = tokenizer.decode_bytes(tokens[:-1]).decode()
        assert (json.loads(written) if wanted.kind == "json_schema" else written) == text


def test_states_of_one_grammar_are_independent(grammars: GrammarCompiler, tokenizer: EngineTokenizer) -> None:
    wanted = StructuredOutput(regex="ab")
    first, second = grammars.start(wanted), grammars.start(wanted)
    before = second.allowed()
    first.advance(tokenizer.encode("a", add_special_tokens=False)[0])
    np.testing.assert_array_equal(second.allowed(), before)
    assert not np.array_equal(first.allowed(), before)


def test_compiled_grammars_are_kept_and_their_number_is_bounded(tokenizer: EngineTokenizer) -> None:
    grammars = GrammarCompiler(tokenizer, VOCAB)
    first = StructuredOutput(json_schema={"const": 0})
    assert not grammars.is_compiled(first)
    for number in range(MAX_COMPILED):
        grammars.check(StructuredOutput(json_schema={"const": number}))
    assert grammars.is_compiled(first)
    grammars.check(first)  # used again, so the next oldest is dropped
    grammars.check(StructuredOutput(regex="one more"))
    assert grammars.is_compiled(first)
    assert not grammars.is_compiled(StructuredOutput(json_schema={"const": 1}))


def test_threads_share_a_compiler(tokenizer: EngineTokenizer) -> None:
    grammars = GrammarCompiler(tokenizer, VOCAB)
    done: list[bool] = []

    def use(number: int) -> None:
        for step in range(20):
            wanted = StructuredOutput(regex=f"a{{{1 + (step + number) % 7}}}")
            done.append(bool(grammars.start(wanted).allowed().any()))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 80


def test_a_model_without_an_end_token_cannot_be_constrained(tiny_model: Path) -> None:
    tokenizer = EngineTokenizer(tiny_model)
    tokenizer.eos_token_ids = ()
    with pytest.raises(Unsupported, match="eos_token_id"):
        GrammarCompiler(tokenizer, VOCAB).check(StructuredOutput(regex="a"))


WITHOUT_EXTRA = """
import sys
sys.modules["llguidance"] = None
from pathlib import Path
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.sampler.grammar import GrammarCompiler
from tinkex.errors import Unsupported
from tinkex.types import StructuredOutput
try:
    GrammarCompiler(EngineTokenizer(Path(sys.argv[1])), 512).check(StructuredOutput(regex="a"))
except Unsupported as error:
    print(error)
"""


@pytest.mark.slow
def test_a_missing_extra_is_an_error_with_the_install_command(tiny_model: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRA, str(tiny_model)], capture_output=True, text=True, check=True
    )
    assert "pip install 'tinkex[grammar]'" in found.stdout


HOSTILE: dict[str, dict[str, Any]] = {
    "nested repetition": {"regex": "((a{0,100}){0,100}){0,100}"},
    "exponential automaton": {"regex": "(.*[a-m].{50}){5}"},
    "many classes": {"regex": "(\\p{L}|\\p{N}|\\p{P})*" * 200},
    "products of alternatives": {
        "json_schema": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}-{j}": {"type": "string"}}} for j in range(12)]}
                for i in range(6)
            ]
        }
    },
    "many alternatives": {"grammar": "start: " + " | ".join(f'"{number}"' for number in range(5000))},
    "deep parentheses": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "long lists": {"json_schema": {"type": "array", "minItems": 10**9, "items": {"type": "array"}}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_followed_or_rejected(grammars: GrammarCompiler, name: str) -> None:
    rng = np.random.default_rng(0)
    with contextlib.suppress(InvalidInput):
        state = grammars.start(StructuredOutput(**HOSTILE[name]))
        for _ in range(20):
            allowed = np.flatnonzero(state.allowed())
            assert len(allowed)
            state.advance(int(rng.choice(allowed)))
            if state.complete:
                break


REGEX_PARTS = st.sampled_from(
    [*"ab01.*+?|()[]{}^$\\-,:/\n", "(?i)", "\\d", "\\p{L}", "{2,3}", "é", "\x00", "&", "~"]
)
GRAMMAR_PARTS = st.sampled_from(
    ["\n", " ", *["start", ":", "|", '"a"', "/b/", "x", "(", ")", "[", "]", "*", "+", "?", "~", "..", "3", "%ignore", "%json", "%import", "%llguidance", "{}", "<|im_end|>", "<[5]>", "@", "&", "//", "lazy", "'", "n=3"]]
)  # fmt: skip
KEYWORDS = st.sampled_from(
    [
        "type",
        "properties",
        "items",
        "required",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "$defs",
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "additionalProperties",
        "patternProperties",
        "prefixItems",
        "minItems",
        "maxItems",
        "multipleOf",
        "title",
        "$id",
        "$schema",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["string", "object", "array", "integer", "#", "#/$defs/a", "a", "(", "date", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS | st.just("a"), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip
ANY_OUTPUT = st.one_of(
    st.lists(REGEX_PARTS, max_size=12).map(lambda parts: {"regex": "".join(parts)}),
    st.lists(GRAMMAR_PARTS, max_size=16).map(lambda parts: {"grammar": "start: " + "".join(parts)}),
    st.text(max_size=20).map(lambda text: {"grammar": text}),
    st.dictionaries(KEYWORDS, JSON, max_size=4).map(lambda schema: {"json_schema": schema}),
)


@pytest.mark.slow
@given(ANY_OUTPUT)
@settings(
    max_examples=int(os.environ.get("TINKEX_SCHEMA_EXAMPLES", settings.default.max_examples)),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_arbitrary_input_is_accepted_or_rejected_as_invalid(
    grammars: GrammarCompiler, wanted: dict[str, Any]
) -> None:
    with contextlib.suppress(InvalidInput):
        assert grammars.start(StructuredOutput(**wanted)).allowed().any()
