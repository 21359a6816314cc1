from __future__ import annotations

from pathlib import Path

import pytest

from tinkex.errors import ConfigError
from tinkex.tokenizers.light import LightTokenizer
from tinkex.train.rendering import Renderer, TokenizedExample, filter_by_length

CHAT = [
    {"role": "user", "content": "Say four."},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "Again."},
    {"role": "assistant", "content": "Four!"},
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> LightTokenizer:
    return LightTokenizer.from_directory(tiny_model)


def learned_text(tokenizer: LightTokenizer, tokens: TokenizedExample) -> str:
    return tokenizer.decode([t for t, mine in zip(tokens.ids, tokens.learned, strict=True) if mine])


def test_an_answer_is_learned_after_exactly_the_tokens_a_sampler_is_given(tokenizer: LightTokenizer) -> None:
    renderer = Renderer(tokenizer)
    tokens = renderer.pair(CHAT[:1], "Four.")
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True)
    assert renderer.prompt(CHAT[:1]) == prompt
    assert tokens.ids[: len(prompt)] == prompt
    assert tokens.learned == [False] * len(prompt) + [True] * (len(tokens.ids) - len(prompt))
    assert learned_text(tokenizer, tokens) == "Four.<|im_end|>"
    assert tokens.ids[-1] == tokenizer.eos_token_id


def test_plain_texts_are_chats_where_there_is_a_template_unless_set_otherwise(
    tokenizer: LightTokenizer,
) -> None:
    assert Renderer(tokenizer).prompt("Say four.") == Renderer(tokenizer).prompt(CHAT[:1])
    raw = Renderer(tokenizer, chat=False).pair("Say ", "four.")
    assert raw.ids == [*tokenizer.encode("Say "), *tokenizer.encode("four."), tokenizer.eos_token_id]
    with pytest.raises(ConfigError, match="no chat template"):
        Renderer(tokenizer, chat=False).prompt(CHAT[:1])


def test_all_answers_of_a_chat_can_be_learned(tokenizer: LightTokenizer) -> None:
    tokens = Renderer(tokenizer).all_answers(CHAT)
    assert learned_text(tokenizer, tokens) == "Four.<|im_end|>Four!<|im_end|>"
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert whole.startswith(tokenizer.decode(tokens.ids))


def test_a_template_that_rewrites_earlier_turns_is_rejected_for_all_and_fine_for_the_last(
    tokenizer: LightTokenizer, tiny_model: Path
) -> None:
    other = LightTokenizer.from_directory(tiny_model)
    other.chat_template = (
        "{{ messages|length }}{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(ConfigError, match="--train-on last"):
        Renderer(other).all_answers(CHAT)
    assert learned_text(other, Renderer(other).pair(CHAT[:1], "Four.")) == "Four.<|im_end|>"


def test_a_datum_reads_one_token_less_and_weighs_only_what_is_learned() -> None:
    datum = TokenizedExample([1, 2, 3, 4], [False, False, True, True]).datum(0.5)
    assert datum.model_input.to_ints() == [1, 2, 3]
    assert list(datum.loss_fn_inputs["target_tokens"].data) == [2, 3, 4]
    assert list(datum.loss_fn_inputs["weights"].data) == [0.0, 0.5, 0.5]


def test_examples_that_are_too_long_are_an_error_left_out_or_cut() -> None:
    short, long = (
        TokenizedExample([1, 2], [False, True]),
        TokenizedExample([1, 2, 3, 4], [False, True, True, True]),
    )
    asked = TokenizedExample([1, 2, 3, 4], [False, False, False, True])
    given = [("a:1", short), ("a:2", long), ("a:3", asked)]
    with pytest.raises(ConfigError, match=r"a:2: 4 tokens.*2 such lines"):
        filter_by_length(given, 3, "error")
    assert filter_by_length(given, 3, "skip") == [short]
    assert [one.ids for one in filter_by_length(given, 3, "cut")] == [[1, 2], [1, 2, 3]]
    with pytest.raises(ConfigError, match="every example"):
        filter_by_length(given[1:], 3, "skip")
