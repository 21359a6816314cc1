"""The grammar of strict tools: text is free, calls are those of their schemas, whether or not markers are special tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tinkex.engine.api.compatible.strict_calls import strict_calls
from tinkex.engine.api.compatible.tool_formats import HERMES, LLAMA3, MISTRAL, PYTHON_TAG, ToolFormat
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.sampler.grammar import GrammarCompiler
from tinkex.errors import InvalidInput

DAYS = {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"]}
TOOLS: list[tuple[str, dict[str, Any] | None]] = [("weather", DAYS), ("anything", {"type": "object"})]
MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", PYTHON_TAG, "<think>", "</think>"]


@pytest.fixture(scope="module", params=["text", "special"])
def tokenizer(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: Any) -> EngineTokenizer:
    """A tokenizer for which markers are text, and one that has a special token for each."""
    if request.param == "text":
        return EngineTokenizer(tiny_model)
    from tokenizers import Tokenizer

    home = tmp_path_factory.mktemp("special") / "model"
    shutil.copytree(tiny_model, home)
    extended = Tokenizer.from_file(str(home / "tokenizer.json"))
    extended.add_special_tokens(MARKERS)
    extended.save(str(home / "tokenizer.json"))
    return EngineTokenizer(home)


def is_accepted(text: str, tool_format: ToolFormat, tokenizer: EngineTokenizer) -> bool:
    """Whether an answer can be written, to its end."""
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    state = grammars.start(strict_calls(TOOLS, tool_format, tokenizer))
    for token in [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_ids[0]]:
        if not state.allowed()[token]:
            return False
        state.advance(token)
    return state.complete


HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"days": 1}}\n</tool_call>'
ANSWERS: dict[str, tuple[ToolFormat, list[str], list[str]]] = {
    "hermes": (
        HERMES,
        [
            "",
            'Hello <b> {"name": 1}.',
            HERMES_CALL,
            f"Sure.\n{HERMES_CALL}\n{HERMES_CALL} Done.",
            '<tool_call>\n{"name": "anything", "arguments": {"x": [1]}}\n</tool_call>',
            f"<think>\nHm.\n</think>\n\n{HERMES_CALL}",
            "<think>\nHm.\n</think>\n\nHello",
        ],
        [
            HERMES_CALL.replace("1", "3"),
            HERMES_CALL.replace("weather", "other"),
            HERMES_CALL.removesuffix("</tool_call>"),
            f"{HERMES_CALL} and {HERMES_CALL.replace('1', '3')}",
            "<tool_call>text",
        ],
    ),
    "llama3": (
        LLAMA3,
        [
            "",
            " Hello {",
            '{"name": "weather", "parameters": {"days": 1}}',
            '{"name": "weather", "parameters": {"days": 1}}; {"name": "weather", "parameters": {"days": 2}}',
        ],
        ["{", "{ hello", '{"name": "weather", "parameters": {"days": 3}}', f"{PYTHON_TAG}text"],
    ),
    "mistral": (
        MISTRAL,
        [
            "",
            "Hello [x]",
            '[TOOL_CALLS][{"name": "weather", "arguments": {"days": 1}}]',
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"days": 1}}]',
            '[TOOL_CALLS][{"name": "weather", "arguments": {"days": 1}}, {"name": "weather", "arguments": {"days": 2}}]',
        ],
        [
            "[TOOL_CALLS]",
            '[TOOL_CALLS][{"name": "weather", "arguments": {"days": 3}}]',
            '[TOOL_CALLS][{"name": "weather", "arguments": {"days": 1}}] and',
        ],
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_text_is_free_and_calls_are_those_of_the_schemas(name: str, tokenizer: EngineTokenizer) -> None:
    tool_format, accepted, rejected = ANSWERS[name]
    for text in accepted:
        assert is_accepted(text, tool_format, tokenizer), text
    for text in rejected:
        assert not is_accepted(text, tool_format, tokenizer), text


def test_a_call_of_llama_may_start_with_its_special_token(tokenizer: EngineTokenizer) -> None:
    call = PYTHON_TAG + '{"name": "weather", "parameters": {"days": 1}}'
    is_special = tokenizer.token_id(PYTHON_TAG) is not None
    assert is_accepted(call, LLAMA3, tokenizer) == is_special


@pytest.mark.parametrize("schema", [{"maxLenght": 3}, {"properties": {"a": {"x-guidance": {}}}}])
def test_a_schema_that_would_not_be_enforced_is_rejected(
    schema: dict[str, Any], tokenizer: EngineTokenizer
) -> None:
    with pytest.raises(InvalidInput, match="unknown keyword"):
        strict_calls([("f", schema)], HERMES, tokenizer)
