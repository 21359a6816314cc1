from __future__ import annotations

import pytest

from tinkex.errors import InvalidInput
from tinkex.tokenizers.chat_template import render_chat


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
    ],
)
def test_a_template_that_fails_or_reaches_out_is_an_input_error(template: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        render_chat(template, messages=[{"content": "x"}])
