"""Chat templates in the formats of tool calls and thinking that models use, for tiny models of tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

_TURNS = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- CALL }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
"""
_PROMPT = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

HERMES = (
    "{%- if tools %}{{ '<|im_start|>system\nTools:\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    '{{ \'Call them as <tool_call>\n{"name": …, "arguments": …}\n</tool_call><|im_end|>\n\' }}{% endif %}'
    + _TURNS.replace(
        "CALL",
        "'\n<tool_call>\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '\n</tool_call>'",
    )
    + _PROMPT
)
LLAMA3 = (
    '{%- if tools %}{{ \'<|im_start|>system\nAnswer with {"name": …, "parameters": …} to call one of:\n\' }}'
    "{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    + _TURNS.replace("CALL", "{'name': call.function.name, 'parameters': call.function.arguments} | tojson")
    + _PROMPT
)
MISTRAL = (
    "{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    + _TURNS.replace(
        "CALL",
        "'[TOOL_CALLS][' + {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson + ']'",
    )
    + _PROMPT
)
THINKING = (
    _TURNS.replace("CALL", "''")
    + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    + "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
ALWAYS_THINKING = (
    "{%- if reasoning_effort is defined %}{{ 'effort ' + reasoning_effort + '\n' }}{% endif %}"
    + _TURNS.replace("CALL", "''")
    + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
STRICT = (
    "{%- for message in messages %}{%- if message.role == 'system' %}{{ raise_exception('no system message, please') }}{% endif %}"
    "{{- message.name or '' }}{{ message.content }}{% endfor %}"
)

TEMPLATES = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "thinking": THINKING,
    "always-thinking": ALWAYS_THINKING,
    "strict": STRICT,
    "base": None,
}


def write_chat_models(model: Path, home: Path) -> dict[str, str]:
    """Copies of a model, each with one of the templates; returns their directories by name."""
    found = {}
    for name, template in TEMPLATES.items():
        directory = home / name
        shutil.copytree(model, directory)
        file = directory / "tokenizer_config.json"
        config = json.loads(file.read_text())
        config.pop("chat_template", None)
        if template is not None:
            config["chat_template"] = template
        file.write_text(json.dumps(config))
        found[name] = str(directory)
    return found
