"""Adds the tokens of a tokenizer's configuration files to its ``tokenizer.json``, as ``transformers`` does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tinkex.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tokenizers import AddedToken, Tokenizer

__all__ = ["NAMED_TOKENS", "add_configured_tokens", "named_tokens", "read_json_object"]

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_configured_tokens(tokenizer: Tokenizer, directory: Path) -> None:
    """Adds the tokens of ``tokenizer_config.json``, ``added_tokens.json`` and ``special_tokens_map.json``.

    Tokens with an id must get that id; a named token such as ``eos_token`` becomes an added token even if
    ``tokenizer.json`` has it as an ordinary one.

    Example:
        >>> tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        >>> add_configured_tokens(tokenizer, directory)
        >>> tokenizer.token_to_id("<|tool|>")
        32001
    """
    special = _special_settings(directory)
    listed = special.get("added_tokens_decoder")
    names = [text for text in map(_text, map(special.get, NAMED_TOKENS)) if text]
    if listed is None:
        by_id = _from_file(read_json_object(directory / "added_tokens.json"), names, directory)
    else:
        by_id = {
            _id(token_id, directory): _token(entry, directory, names)
            for token_id, entry in dict(listed).items()
        }
    tokens = [token for _, token in sorted(by_id.items())]
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    known |= {token.content for token in tokens}
    for entry in _others(special):
        token = _token(entry, directory, names, special=True)
        if token.content not in known:
            known.add(token.content)
            tokens.append(token)
    tokenizer.add_tokens(tokens)
    for token_id, token in by_id.items():
        if tokenizer.token_to_id(token.content) != token_id:
            raise SetupError(
                f"the files in {directory} give token {token.content!r} the id {token_id}, but with tokenizer.json it is "
                f"{tokenizer.token_to_id(token.content)}; save the tokenizer again with all its tokens in tokenizer.json"
            )


def named_tokens(directory: Path) -> dict[str, str]:
    """Returns the named special tokens of ``tokenizer_config.json`` and ``special_tokens_map.json``.

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
    """Returns the settings of a tokenizer's special tokens: ``tokenizer_config.json``.

    The older ``special_tokens_map.json`` takes precedence if the config has no ``added_tokens_decoder``.
    """
    config = read_json_object(directory / "tokenizer_config.json")
    if config.get("added_tokens_decoder") is not None:
        return config
    return {**config, **read_json_object(directory / "special_tokens_map.json")}


def _from_file(ids: Mapping[str, Any], names: list[str], directory: Path) -> dict[int, AddedToken]:
    from tokenizers import AddedToken

    return {
        _id(token_id, directory): AddedToken(text, normalized=text not in names, special=text in names)
        for text, token_id in ids.items()
    }


def _others(special: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the tokens without an id: named ones, then those in lists."""
    for name in NAMED_TOKENS:
        if _text(special.get(name)):
            yield special[name]
    for name in _LISTS:
        value = special.get(name) or []
        yield from value.values() if isinstance(value, dict) else value


def _token(entry: Any, directory: Path, names: list[str], *, special: bool = False) -> AddedToken:
    from tokenizers import AddedToken

    text = _text(entry)
    if not text:
        raise SetupError(f"the tokenizer in {directory} lists {entry!r} as a token; download the model again")
    flags = {flag: bool(entry[flag]) for flag in _FLAGS if isinstance(entry, dict) and flag in entry}
    if special or text in names:
        flags["special"] = True
    return AddedToken(text, **flags)


def _text(entry: Any) -> str | None:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) and text else None


def _id(token_id: Any, directory: Path) -> int:
    try:
        return int(token_id)
    except (TypeError, ValueError):
        raise SetupError(
            f"the tokenizer in {directory} gives a token the id {token_id!r}; download the model again"
        ) from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file of the tokenizer; returns an empty one if there is no file.

    >>> from pathlib import Path
    >>> read_json_object(Path("/no/such/directory/added_tokens.json"))
    {}
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SetupError(f"{path} cannot be read as JSON ({error}); download the model again") from error
    return value if isinstance(value, dict) else {}
