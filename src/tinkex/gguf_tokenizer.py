"""Builds an ordinary tokenizer out of the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

__all__ = ["build_tokenizer", "special_tokens"]

# Values of tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

# How words are cut before merging, by the name a GGUF file gives it.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_LLAMA3_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_PRE_TOKENIZERS = ("smollm", "gpt-2", "default", "qwen2", "llama-bpe", "llama-v3", "llama3")


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer that ``metadata`` describes; refuses, by name, what it cannot rebuild exactly.

    Example:
        >>> build_tokenizer(metadata).encode("2024").tokens  # SmolLM2 splits digits one by one
        ['2', '0', '2', '4']
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise SetupError(
            f"the GGUF file's tokenizer model {kind!r} is not supported, only byte-level BPE ('gpt2') is; "
            "use the model's Hugging Face directory instead"
        )
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    if not tokens or not merges:
        raise SetupError("the GGUF file has no tokenizer (tokenizer.ggml.tokens and .merges); fetch it again")
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: place for place, token in enumerate(tokens) if kinds[place] != _UNUSED},
            merges=[_pair(merge) for merge in merges],
            # Llama 3 keeps a whole word that is a token, whatever the merges would make of it.
            ignore_merges=pre in {"llama-bpe", "llama-v3", "llama3"},
        )
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kinds[place] == _CONTROL, normalized=False)
        for place, token in enumerate(tokens)
        if kinds[place] in {_CONTROL, _USER_DEFINED}
    ]
    tokenizer.add_tokens(added)
    _add_bos(tokenizer, metadata, pre)
    return tokenizer


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens (``bos_token``, ``eos_token``…) by their text."""
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    return {name: tokens[place] for name, place in ids.items() if place is not None}


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(name: str) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name in {"gpt-2", "default"}:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name not in _PRE_TOKENIZERS:
        raise SetupError(
            f"the GGUF file's pre-tokenizer {name!r} is not supported; supported are {', '.join(_PRE_TOKENIZERS)}. "
            "Use the model's Hugging Face directory instead"
        )
    words = Regex(_QWEN2_WORDS if name == "qwen2" else _LLAMA3_WORDS)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _add_bos(tokenizer: Tokenizer, metadata: Mapping[str, Any], pre: str) -> None:
    """Puts the beginning-of-text token before every text, where the model was trained so."""
    from tokenizers import processors

    wanted = metadata.get("tokenizer.ggml.add_bos_token", pre in {"llama-bpe", "llama-v3", "llama3"})
    bos = special_tokens(metadata).get("bos_token")
    if not wanted or bos is None:
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
