"""Tokens that a tokenizer's other files add to its ``tokenizer.json``, as ``transformers`` adds them when it loads one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tinkex.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tokenizers import AddedToken, Tokenizer

__all__ = ["NAMED_TOKENS", "add_stated_tokens", "named_tokens", "read_settings"]

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_stated_tokens(tokenizer: Tokenizer, directory: Path) -> None:
    """Adds what ``tokenizer_config.json``, ``added_tokens.json`` and ``special_tokens_map.json`` state beside it.

    Tokens with an id must get that id; a named token such as the end of text becomes a token of its own even where
    ``tokenizer.json`` has it among ordinary ones.

    Example:
        >>> tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        >>> add_stated_tokens(tokenizer, directory)
        >>> tokenizer.token_to_id("<|tool|>")
        32001
    """
    special = _special_settings(directory)
    listed = special.get("added_tokens_decoder")
    names = [text for text in map(_text, map(special.get, NAMED_TOKENS)) if text]
    if listed is None:
        by_id = _from_file(read_settings(directory / "added_tokens.json"), names, directory)
    else:
        by_id = {
            _id(place, directory): _token(stated, directory, names) for place, stated in dict(listed).items()
        }
    tokens = [token for _, token in sorted(by_id.items())]
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    known |= {token.content for token in tokens}
    for stated in _others(special):
        token = _token(stated, directory, names, special=True)
        if token.content not in known:
            known.add(token.content)
            tokens.append(token)
    tokenizer.add_tokens(tokens)
    for place, token in by_id.items():
        if tokenizer.token_to_id(token.content) != place:
            raise SetupError(
                f"the files in {directory} give token {token.content!r} the id {place}, and tokenizer.json leaves it "
                f"{tokenizer.token_to_id(token.content)}; save the tokenizer again with all its tokens in tokenizer.json"
            )


def named_tokens(directory: Path) -> dict[str, str]:
    """The special tokens that have a name, as ``tokenizer_config.json`` and ``special_tokens_map.json`` give them.

    Example:
        >>> named_tokens(directory)["eos_token"]
        '<|im_end|>'
    """
    settings = _special_settings(directory)
    found: dict[str, str] = {}
    for name in NAMED_TOKENS:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _special_settings(directory: Path) -> Mapping[str, Any]:
    """What names a tokenizer's special tokens: ``tokenizer_config.json``.

    The older ``special_tokens_map.json`` has the last word where the config does not list its tokens itself.
    """
    config = read_settings(directory / "tokenizer_config.json")
    if config.get("added_tokens_decoder") is not None:
        return config
    return {**config, **read_settings(directory / "special_tokens_map.json")}


def _from_file(ids: Mapping[str, Any], names: list[str], directory: Path) -> dict[int, AddedToken]:
    from tokenizers import AddedToken

    return {
        _id(place, directory): AddedToken(text, normalized=text not in names, special=text in names)
        for text, place in ids.items()
    }


def _others(special: Mapping[str, Any]) -> Iterator[Any]:
    """The tokens without an id: those with a name, then those in lists."""
    for name in NAMED_TOKENS:
        if _text(special.get(name)):
            yield special[name]
    for name in _LISTS:
        value = special.get(name) or []
        yield from value.values() if isinstance(value, dict) else value


def _token(stated: Any, directory: Path, names: list[str], *, special: bool = False) -> AddedToken:
    from tokenizers import AddedToken

    text = _text(stated)
    if not text:
        raise SetupError(f"the tokenizer in {directory} states {stated!r} as a token; fetch the model again")
    flags = {flag: bool(stated[flag]) for flag in _FLAGS if isinstance(stated, dict) and flag in stated}
    if special or text in names:
        flags["special"] = True
    return AddedToken(text, **flags)


def _text(stated: Any) -> str | None:
    text = stated.get("content") if isinstance(stated, dict) else stated
    return text if isinstance(text, str) and text else None


def _id(place: Any, directory: Path) -> int:
    try:
        return int(place)
    except (TypeError, ValueError):
        raise SetupError(
            f"the tokenizer in {directory} gives a token the id {place!r}; fetch the model again"
        ) from None


def read_settings(path: Path) -> dict[str, Any]:
    """What a JSON file beside a tokenizer says; nothing where there is none.

    >>> from pathlib import Path
    >>> read_settings(Path("/no/such/directory/added_tokens.json"))
    {}
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read as JSON ({error}); fetch the model again") from error
    return value if isinstance(value, dict) else {}
