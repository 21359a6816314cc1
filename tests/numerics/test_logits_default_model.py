"""The default model, fetched as a user gets it, is the real one: right tokens, right logits, sensible words."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinkex.engine.config import EngineConfig
from tinkex.engine.model.attention import packed_causal
from tinkex.engine.model.catalog import DEFAULT_MODEL, LoadedModel, load_model

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(DEFAULT_MODEL, EngineConfig().models_home)


def _logits(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    model = loaded.transformer
    attend = packed_causal([len(tokens)], model.arch)
    with torch.no_grad():
        return model.logits(model.hidden(torch.tensor(tokens), torch.arange(len(tokens)), attend))


def test_it_has_the_shape_of_smollm2(loaded: LoadedModel) -> None:
    arch = loaded.transformer.arch
    assert (arch.num_layers, arch.hidden_size, arch.num_heads, arch.num_kv_heads) == (30, 576, 9, 3)
    assert (arch.vocab_size, arch.max_context, arch.tie_embeddings, arch.eos_token_ids) == (
        49152,
        8192,
        True,
        (2,),
    )


def test_its_tokenizer_is_the_right_one(loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (49152, (2,))
    assert (tokenizer.token_id("<|im_start|>"), tokenizer.token_id("<|im_end|>")) == (1, 2)
    assert tokenizer.encode("2024") == [tokenizer.encode(digit)[0] for digit in "2024"]
    official = AutoTokenizer.from_pretrained(loaded.directory)
    for text in ["Hello world", "In 2024, 3.14159…", "漢字 🙂\n\n  x", "<|im_start|>user\nhi<|im_end|>\n"]:
        assert tokenizer.encode(text) == official.encode(text)
        assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()
    assert (len(official), official.eos_token_id) == (49152, 2)


def test_its_logits_equal_those_of_transformers(loaded: LoadedModel) -> None:
    reference = AutoModelForCausalLM.from_pretrained(loaded.directory, dtype=torch.float32)
    tokens = loaded.tokenizer.encode("The sea ran to the sky, and 12 ships sailed on it.")
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(_logits(loaded, tokens), expected, rtol=0, atol=1e-4)


def test_it_answers_with_the_capital_of_france(loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    tokens = list(prompt)
    while len(tokens) < len(prompt) + 24 and tokens[-1] not in tokenizer.eos_token_ids:
        tokens.append(int(_logits(loaded, tokens)[-1].argmax()))
    assert "Paris" in tokenizer.decode(tokens[len(prompt) :])
