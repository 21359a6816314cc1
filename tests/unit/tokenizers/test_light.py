"""The light tokenizer says what the usual one says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinkex.errors import SetupError
from tinkex.tokenizers.light import LightTokenizer

pytestmark = pytest.mark.slow

TEXTS = [
    "",
    "hello world",
    "  two  spaces",
    "naïve café ✓ 日本",
    "line\nbreak\t1234567890",
    "<|im_end|> inside",
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi — é?"},
]


@pytest.fixture(scope="module")
def light(tiny_model: Path) -> LightTokenizer:
    return LightTokenizer.from_directory(tiny_model)


@pytest.fixture(scope="module")
def usual(tiny_model: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(tiny_model))


@pytest.mark.parametrize("text", TEXTS)
def test_texts_become_the_same_tokens_and_come_back(light: LightTokenizer, usual: Any, text: str) -> None:
    for special in (True, False):
        ids = light.encode(text, add_special_tokens=special)
        assert ids == usual.encode(text, add_special_tokens=special)
        for skip in (True, False):
            assert light.decode(ids, skip_special_tokens=skip) == usual.decode(ids, skip_special_tokens=skip)
    assert light.tokenize(text) == usual.tokenize(text)
    called = light(text)
    assert called["input_ids"] == called.input_ids == usual(text)["input_ids"]
    assert called.attention_mask == [1] * len(called.input_ids)


@pytest.mark.parametrize("prompt", [True, False])
def test_chats_become_the_same_prompt(light: LightTokenizer, usual: Any, prompt: bool) -> None:
    text = usual.apply_chat_template(CHAT, add_generation_prompt=prompt, tokenize=False)
    assert light.apply_chat_template(CHAT, add_generation_prompt=prompt, tokenize=False) == text
    ids = list(usual.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False))
    assert light.apply_chat_template(CHAT, add_generation_prompt=prompt) == ids
    both = light.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=True)
    assert both["input_ids"] == ids
    two = [CHAT, CHAT[1:]]
    assert light.apply_chat_template(two, tokenize=False) == usual.apply_chat_template(two, tokenize=False)
    assert light.apply_chat_template(two, return_dict=True)["input_ids"] == list(
        usual.apply_chat_template(two, return_dict=False)
    )


def test_special_tokens_and_sizes_are_the_same(light: LightTokenizer, usual: Any) -> None:
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(light, name) == getattr(usual, name), name
        assert getattr(light, f"{name}_id") == getattr(usual, f"{name}_id"), name
    assert light.vocab_size == usual.vocab_size
    assert len(light) == len(usual)
    assert light.get_vocab() == usual.get_vocab()
    assert light.get_added_vocab() == usual.get_added_vocab()
    assert light.special_tokens_map == usual.special_tokens_map
    assert set(light.all_special_ids) == set(usual.all_special_ids) | {light.bos_token_id}
    assert light.convert_tokens_to_ids(light.all_special_tokens) == light.all_special_ids
    assert light.is_fast == usual.is_fast
    assert light.padding_side == usual.padding_side
    assert light.chat_template == usual.chat_template


def test_single_tokens_are_looked_up_both_ways(light: LightTokenizer, usual: Any) -> None:
    ids = light.encode("hello", add_special_tokens=False)
    tokens = light.convert_ids_to_tokens(ids)
    assert tokens == usual.convert_ids_to_tokens(ids)
    assert light.convert_tokens_to_ids(tokens) == ids
    assert light.convert_tokens_to_ids(light.convert_ids_to_tokens(ids[0])) == ids[0]
    unknown = [tokens[0], "no such token"]
    assert light.convert_tokens_to_ids(unknown) == usual.convert_tokens_to_ids(unknown)
    assert light.convert_tokens_to_ids("no such token") == usual.unk_token_id
    assert light.convert_ids_to_tokens(np.array(ids)) == tokens


def test_several_texts_and_arrays_are_taken(light: LightTokenizer) -> None:
    rows = light(["a b", "c"]).input_ids
    assert light.batch_decode(rows, skip_special_tokens=True) == ["a b", "c"]
    assert light.decode(np.array(rows[0])) == light.decode(rows[0])
    assert light.decode(rows[0][0]) == light.decode([rows[0][0]])


def test_what_it_cannot_do_is_rejected_with_an_error_that_names_it(light: LightTokenizer) -> None:
    with pytest.raises(ValueError, match="return_tensors"):
        light.apply_chat_template(CHAT, return_tensors="pt")
    plain = LightTokenizer(light.backend_tokenizer, name_or_path="plain")
    with pytest.raises(ValueError, match="chat template"):
        plain.apply_chat_template(CHAT)
    assert plain.eos_token_id is None


def test_a_template_may_reject_the_messages_in_its_own_words(light: LightTokenizer) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="roles must alternate"):
        light.apply_chat_template(CHAT, chat_template=template)


def test_templates_get_variables_json_and_the_date_but_no_way_out(light: LightTokenizer) -> None:
    def render(template: str, **variables: Any) -> Any:
        return light.apply_chat_template(CHAT, chat_template=template, tokenize=False, **variables)

    assert render("{{ thinking }}", thinking=True) == "True"
    assert render("{{ messages[0] | tojson }}") == json.dumps(CHAT[0])
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% generation %}x{% endgeneration %}") == "x"
    assert render("{{ eos_token }}") == light.eos_token
    with pytest.raises(ValueError, match="unsafe"):
        render("{{ ''.__class__.__mro__ }}")


def test_a_directory_without_a_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"tokenizer\.json"):
        LightTokenizer.from_directory(tmp_path)


def test_named_templates_and_written_out_tokens_are_read(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny_model / "tokenizer.json").read_bytes())
    config = {
        "eos_token": {"content": "<|im_end|>"},
        "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    light = LightTokenizer.from_directory(tmp_path)
    assert (light.eos_token, light.chat_template) == ("<|im_end|>", "d")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(SetupError, match=r"tokenizer_config\.json"):
        LightTokenizer.from_directory(tmp_path)
