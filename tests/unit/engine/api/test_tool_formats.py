"""Which format of tool calls a chat template teaches."""

from __future__ import annotations

import pytest

from tinkex.engine.api.compatible.tool_formats import find_tool_format

TEMPLATES = {
    'a JSON object within <tool_call></tool_call> XML tags: {"name": …, "arguments": …}': "hermes",
    'Respond in the format {"name": function name, "parameters": dictionary}': "llama3",
    "{{ '<|python_tag|>' + call }}": "llama3",
    "{{ '[TOOL_CALLS]' + calls }}": "mistral",
    "<tool_call>\n<function=name>\n<parameter=a>": None,
    "<tool_call>{name}\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>": None,
    '<|tool_call|>[{"name": "a", "parameters": {}}]<|/tool_call|>': None,
    '<TOOLCALL>[{"name": "a", "parameters": {}}]</TOOLCALL>': None,
    '<minimax:tool_call>\n<invoke name="a">\n<parameter name="b">': None,
    "{{ tools }}": None,
}


@pytest.mark.parametrize(("template", "name"), TEMPLATES.items(), ids=str)
def test_a_format_is_recognised_or_left_alone(template: str, name: str | None) -> None:
    found = find_tool_format(template)
    assert (found.name if found else None) == name
