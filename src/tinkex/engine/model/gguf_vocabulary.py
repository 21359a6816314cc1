"""Describes a tokenizer as the metadata of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinkex.errors import SetupError
from tinkex.tokenizers.gguf_tokenizer import (
    PRE_TOKENIZERS,
    TOKEN_TYPES,
    build_pre_tokenizer,
    build_tokenizer,
)

if TYPE_CHECKING:
    from tokenizers import AddedToken

    from tinkex.engine.model.tokenizer import EngineTokenizer

__all__ = ["describe_tokenizer"]

# Words, contractions in both cases, numbers, spaces, line ends, punctuation, scripts and an emoji: where pre-tokenizers differ.
_PROBE = (
    "It's the 12345th test, isn't it? WE'LL see: x1=3.14159!\n\n\tdef f(a, b):\n        return a  +  b\r\n"
    "Größe naïve Ελληνικά русский 日本語 العربية 👩‍🚀 don't  stop...   (end) \n \n  "
)


def describe_tokenizer(tokenizer: EngineTokenizer, num_rows: int) -> dict[str, Any]:
    """Returns the ``tokenizer.*`` metadata for a model whose embedding has ``num_rows`` rows.

    The description is checked: a tokenizer that is built from it must encode a sample text like the original. Raises
    ``SetupError`` for a tokenizer that GGUF files cannot describe, or not with a pre-tokenizer known here.

    Example:
        >>> describe_tokenizer(EngineTokenizer(directory), 49152)["tokenizer.ggml.pre"]
        'smollm'
    """
    model = tokenizer.definition.get("model") or {}
    if model.get("type") != "BPE":
        raise _unsupported(tokenizer, f"its model is {model.get('type')!r}, not BPE")
    tokens, types = _tokens(tokenizer, num_rows)
    common: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        **_special_ids(tokenizer),
        **_ends(tokenizer),
    }
    if tokenizer.chat_template is not None:
        common["tokenizer.chat_template"] = tokenizer.chat_template
    merges = [
        tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]
    ]
    if not merges:
        raise _unsupported(tokenizer, "it has no merges")
    if model.get("byte_fallback"):
        kind = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": _scores(tokens, merges),
        }
        candidates = [{**kind, "tokenizer.ggml.add_space_prefix": prefix} for prefix in (True, False)]
    else:
        kind = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        }
        candidates = [{**kind, "tokenizer.ggml.pre": _pre_tokenizer_name(tokenizer)}]
    for candidate in candidates:
        described = {**candidate, **common}
        if _encodes_alike(tokenizer, described):
            return described
    raise _unsupported(
        tokenizer, "a tokenizer rebuilt from the metadata does not encode a sample text in the same way"
    )


def _unsupported(tokenizer: EngineTokenizer, reason: str) -> SetupError:
    return SetupError(
        f"the tokenizer in {tokenizer.directory} cannot be written to a GGUF file: {reason}; export a model directory "
        "instead (without --gguf), and convert it with convert_hf_to_gguf.py of llama.cpp"
    )


def _tokens(tokenizer: EngineTokenizer, num_rows: int) -> tuple[list[str], list[int]]:
    """Returns the text and the type of the token of every row; rows without a token get an unused one."""
    added = tokenizer.backend.get_added_tokens_decoder()
    unknown = tokenizer.special_tokens.get("unk_token") if _has_byte_tokens(tokenizer) else None
    tokens = [f"[PAD{row}]" for row in range(num_rows)]
    types = [TOKEN_TYPES["unused"]] * num_rows
    for token, token_id in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        tokens[token_id] = token
        types[token_id] = TOKEN_TYPES[_type(token, added.get(token_id), unknown, tokenizer)]
    return tokens, types


def _type(token: str, added: AddedToken | None, unknown: str | None, tokenizer: EngineTokenizer) -> str:
    if token == unknown:
        return "unknown"
    if added is not None:
        return "control" if added.special else "user_defined"
    is_byte = _has_byte_tokens(tokenizer) and len(token) == 6 and token.startswith("<0x")
    return "byte" if is_byte else "normal"


def _has_byte_tokens(tokenizer: EngineTokenizer) -> bool:
    return bool(tokenizer.definition["model"].get("byte_fallback"))


def _scores(tokens: list[str], merges: list[tuple[str, ...]]) -> list[float]:
    """Returns a score for every token: the earlier a merge, the higher the score of the piece that it gives."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _special_ids(tokenizer: EngineTokenizer) -> dict[str, int]:
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {
        f"tokenizer.ggml.{key}_token_id": tokenizer.token_id(tokenizer.special_tokens[name])
        for name, key in named.items()
        if name in tokenizer.special_tokens
    }
    ends = [end for end in tokenizer.eos_token_ids if end != ids.get("tokenizer.ggml.eos_token_id")]
    if "tokenizer.ggml.eos_token_id" not in ids and ends:
        ids["tokenizer.ggml.eos_token_id"] = ends.pop(0)
    for key, end in zip(("eot", "eom"), ends, strict=False):
        ids[f"tokenizer.ggml.{key}_token_id"] = end
    return {key: token_id for key, token_id in ids.items() if token_id is not None}


def _ends(tokenizer: EngineTokenizer) -> dict[str, bool]:
    """Returns whether a text gets a BOS before it and an EOS after it."""
    plain, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    bos, eos = (
        tokenizer.token_id(tokenizer.special_tokens[name]) if name in tokenizer.special_tokens else None
        for name in ("bos_token", "eos_token")
    )
    ends = {
        (add_bos, add_eos): [bos] * add_bos + plain + [eos] * add_eos
        for add_bos in (False, True)
        for add_eos in (False, True)
    }
    for (add_bos, add_eos), expected in ends.items():
        if whole == expected:
            return {"tokenizer.ggml.add_bos_token": add_bos, "tokenizer.ggml.add_eos_token": add_eos}
    raise _unsupported(tokenizer, "it adds other tokens to a text than its BOS and EOS")


def _pre_tokenizer_name(tokenizer: EngineTokenizer) -> str:
    """Returns the name that llama.cpp has for the tokenizer's pre-tokenizer: the one that splits a sample text alike."""
    own = tokenizer.backend.pre_tokenizer
    pieces = None if own is None else own.pre_tokenize_str(_PROBE)
    for name in PRE_TOKENIZERS:
        # llama.cpp's default is not the one of GPT-2, which our reader takes for it.
        if name != "default" and build_pre_tokenizer(name).pre_tokenize_str(_PROBE) == pieces:
            return name
    raise _unsupported(tokenizer, f"its pre-tokenizer is none of {', '.join(PRE_TOKENIZERS)}")


def _encodes_alike(tokenizer: EngineTokenizer, described: dict[str, Any]) -> bool:
    rebuilt = build_tokenizer(described)
    special = "".join(tokenizer.special_tokens.values())
    return all(list(rebuilt.encode(text).ids) == tokenizer.encode(text) for text in (_PROBE, f"a{special} b"))
