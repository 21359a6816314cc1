"""Builds a ``tokenizers.Tokenizer`` from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

__all__ = ["PRE_TOKENIZERS", "TOKEN_TYPES", "build_pre_tokenizer", "build_tokenizer", "special_tokens"]

TOKEN_TYPES = {"normal": 1, "unknown": 2, "control": 3, "user_defined": 4, "unused": 5, "byte": 6}
"""Values of tokenizer.ggml.token_type."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _ = TOKEN_TYPES.values()

# Pre-tokenization patterns, by their name in GGUF files.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_LLAMA3_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_LLAMA3_NAMES = frozenset({"llama-bpe", "llama-v3", "llama3"})
PRE_TOKENIZERS = ("smollm", "gpt-2", "default", "qwen2", "llama-bpe", "llama-v3", "llama3")
"""The names of pre-tokenizers that can be built, as GGUF files have them."""


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer of ``metadata``; raises ``SetupError`` for one that it cannot rebuild exactly.

    Supports byte-level BPE (``gpt2``) with a known pre-tokenizer, and the SentencePiece BPE of Llama 2, Mistral and
    TinyLlama (``llama``).

    Example:
        >>> build_tokenizer(metadata).encode("2024").tokens  # SmolLM2 splits digits one by one
        ['2', '0', '2', '4']
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise SetupError(
            f"the GGUF file's tokenizer model {kind!r} is not supported, only byte-level BPE ('gpt2') and SentencePiece BPE "
            "('llama') are; use the model's Hugging Face directory instead"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise SetupError("the GGUF file has no tokenizer (tokenizer.ggml.tokens); download it again")
    try:
        tokenizer = _byte_level(metadata) if kind == "gpt2" else _sentencepiece(metadata)
        _add_special(tokenizer, metadata)
    except SetupError:
        raise
    except (
        Exception
    ) as error:  # tokenizers raises bare Exception for a vocabulary that does not fit its merges
        raise SetupError(f"the GGUF file's tokenizer is inconsistent ({error}); download it again") from error
    return tokenizer


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.merges")
    if not merges:
        raise SetupError("the GGUF file's tokenizer has no tokenizer.ggml.merges; download it again")
    kinds = _token_kinds(metadata)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens) if kinds[token_id] != _UNUSED},
            merges=[_pair(merge) for merge in merges],
            # Llama 3 encodes a whole word that is a token without applying merges.
            ignore_merges=pre in _LLAMA3_NAMES,
        )
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = build_pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds BPE merges from the scores of the pieces: the best-scoring piece merges first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise SetupError(
            "the GGUF file's tokenizer has no tokenizer.ggml.scores for its tokens; download it again"
        )
    kinds = _token_kinds(metadata)
    vocab = {token: token_id for token_id, token in enumerate(tokens) if kinds[token_id] != _UNUSED}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if unknown is None or any(f"<0x{byte:02X}>" not in vocab for byte in range(256)):
        raise SetupError(
            "the GGUF file's SentencePiece tokenizer has no unknown token or no byte tokens, which is not supported; "
            "use the model's Hugging Face directory instead"
        )
    pieces = {token for token, token_id in vocab.items() if kinds[token_id] == _NORMAL}
    by_score = sorted(pieces, key=lambda piece: (-scores[vocab[piece]], vocab[piece]))
    merges = [
        (piece[:cut], piece[cut:])
        for piece in by_score
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    with_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), spaces] if with_prefix else [spaces]
    )
    text: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)] if with_prefix else text)
    return tokenizer


def _add_special(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Adds special and user-defined tokens, and the post-processor for BOS and EOS."""
    from tokenizers import AddedToken

    kinds = _token_kinds(metadata)
    added = [
        AddedToken(token, special=kinds[token_id] != _USER_DEFINED, normalized=False)
        for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])
        if kinds[token_id] in {_UNKNOWN, _CONTROL, _USER_DEFINED}
    ]
    tokenizer.add_tokens(added)
    _add_ends(tokenizer, metadata)


def _token_kinds(metadata: Mapping[str, Any]) -> Sequence[int]:
    kinds: Sequence[int] | None = metadata.get("tokenizer.ggml.token_type")
    return kinds or [_NORMAL] * len(metadata["tokenizer.ggml.tokens"])


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the named special tokens (``bos_token``, ``eos_token``…); raises ``SetupError`` for an id without a token."""
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    for name, token_id in ids.items():
        if token_id is not None and (not isinstance(token_id, int) or not 0 <= token_id < len(tokens)):
            raise SetupError(
                f"the GGUF file's {name} is number {token_id!r:.80} of {len(tokens)} tokens; download it again"
            )
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def build_pre_tokenizer(name: str) -> PreTokenizer:
    """Builds the pre-tokenizer that GGUF files call ``name``; raises ``SetupError`` for one that is not known.

    Example:
        >>> [piece for piece, _ in build_pre_tokenizer("llama-bpe").pre_tokenize_str("in 2024")]
        ['in', 'Ġ', '202', '4']
    """
    from tokenizers import Regex, pre_tokenizers

    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name in {"gpt-2", "default"}:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name not in PRE_TOKENIZERS:
        raise SetupError(
            f"the GGUF file's pre-tokenizer {name!r} is not supported, only {', '.join(PRE_TOKENIZERS)} are. "
            "Use the model's Hugging Face directory instead"
        )
    words = Regex(_QWEN2_WORDS if name == "qwen2" else _LLAMA3_WORDS)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _add_ends(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Adds BOS and EOS to every text, as the metadata specifies."""
    from tokenizers import processors

    bos_by_default = (
        metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    )
    special = special_tokens(metadata)
    before = (
        special.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", bos_by_default) else None
    )
    after = special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token") else None
    around = [token for token in (before, after) if token is not None]
    if not around:
        return
    first, second = (
        " ".join(part for part in (before, text, after) if part is not None) for text in ("$A", "$B")
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=first,
        pair=f"{first} {second}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(around)],
    )
