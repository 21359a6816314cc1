from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import InvalidInput, SetupError
from tinkex.tokenizers.chat_template import chat_template_of, render_chat, template_variables


def test_a_template_sees_its_variables() -> None:
    template = "{% for m in messages %}\n  {{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}{{ extra }}"
    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "ho"}]
    assert render_chat(template, messages=messages, extra="!") == "  user: hi\n  assistant: ho\n!"


def test_json_is_not_escaped_for_html() -> None:
    assert render_chat("{{ tools | tojson }}", tools=[{"q": "a < b & é"}]) == '[{"q": "a < b & é"}]'
    assert render_chat("{{ tools | tojson(indent=1) }}", tools=[1]) == "[\n 1\n]"


def test_loop_controls_and_generation_marks_work() -> None:
    template = "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{% generation %}{{ i }}{% endgeneration %}{% endfor %}"
    assert render_chat(template) == "1"


def test_a_template_can_tell_the_date() -> None:
    assert len(render_chat("{{ strftime_now('%Y') }}")) == 4


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{% if %}", "cannot render"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ 2.0 ** 5000 }}", "cannot render"),
        ("{{ range(10 ** 9) | length }}", "cannot render"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot render"),
        ("{% for i in [1] %}" * 40 + "{% endfor %}" * 40, "cannot render"),
        ("{{ messages | map(attribute='x.y') | list | sum }}", "cannot render"),
        ("{{ strftime_now(3) }}", "cannot render"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_an_input_error(template: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        render_chat(template, messages=[{"content": "x"}])


@pytest.mark.parametrize(
    "template",
    ["{% if %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ " + "1" * 5000 + " }}"],
    ids=["syntax", "nested", "digits"],
)
def test_a_template_that_cannot_be_parsed_is_an_input_error(template: str) -> None:
    with pytest.raises(InvalidInput, match="cannot be parsed"):
        template_variables(template)


PIECES = st.sampled_from(
    [
        *(
            "{{",
            "}}",
            "{%",
            "%}",
            "{#",
            "#}",
            "(",
            ")",
            "[",
            "]",
            "|",
            "~",
            ".",
            ",",
            "=",
            "-",
            "**",
            "//",
            "%",
        ),
        *(
            "for",
            "in",
            "endfor",
            "if",
            "else",
            "endif",
            "set",
            "macro",
            "endmacro",
            "call",
            "endcall",
            "filter",
        ),
        *("generation", "endgeneration", "break", "continue", "import", "include", "extends", "block", "raw"),
        *(
            "messages",
            "loop",
            "namespace",
            "range",
            "x",
            "0",
            "1",
            "'a'",
            "none",
            "tojson",
            "map",
            "sort",
            "trim",
        ),
        *("raise_exception", "strftime_now", "__class__", "self", "caller"),
    ]
)


@given(st.lists(PIECES, max_size=14))
def test_any_template_renders_text_or_is_an_input_error(pieces: list[str]) -> None:
    rejection = ""
    try:
        assert isinstance(render_chat(" ".join(pieces), messages=[{"role": "user", "content": "x"}]), str)
    except InvalidInput as error:
        rejection = str(error)
    assert not rejection or "cannot render these messages: " in rejection


def test_a_directory_has_the_template_named_default(tmp_path: Path) -> None:
    both = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    assert chat_template_of(tmp_path, {"chat_template": both}) == "b"
    assert chat_template_of(tmp_path, {"chat_template": both[:1]}) is None
    assert chat_template_of(tmp_path, {}) is None


@pytest.mark.parametrize("stated", [3, {"default": "a"}, [{"name": "default", "template": 3}]])
def test_a_template_that_is_not_text_is_rejected(tmp_path: Path, stated: Any) -> None:
    with pytest.raises(SetupError, match=r"chat_template in .*tokenizer_config\.json is not text"):
        chat_template_of(tmp_path, {"chat_template": stated})


@pytest.mark.parametrize("entries", [[3], ["a", None], [{}], [{"name": ["a"], "template": "b"}]])
def test_entries_that_are_no_templates_are_no_default_one(tmp_path: Path, entries: Any) -> None:
    assert chat_template_of(tmp_path, {"chat_template": entries}) is None


def test_a_template_file_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{{ messages }}")
    with pytest.raises(SetupError, match="not UTF-8 text"):
        chat_template_of(tmp_path, {})
