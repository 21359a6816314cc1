"""Maps a model's name to the hub repository of its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["hub_name", "is_kimi", "pinned_revision"]

LLAMA_3 = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
"""The tokenizer of all Llama 3 models, in a repository that is not gated."""

_PINNED: Mapping[str, str] = {
    "moonshotai/Kimi-K2-Thinking": "612681931a8c906ddb349f8ad0f582cb552189cd",
}


def hub_name(model: str) -> str:
    """Returns the hub repository of a model's tokenizer.

    A checkpoint after a semicolon, a suffix after a colon and a variant after a second slash are ignored; Llama 3 maps to a copy
    that is not gated.

    >>> hub_name("Qwen/Qwen3-8B:peft:262144"), hub_name("moonshotai/Kimi-K2/base")
    ('Qwen/Qwen3-8B', 'moonshotai/Kimi-K2')
    """
    name = model.partition(";")[0].partition(":")[0]
    if name.startswith("meta-llama/Llama-3"):
        return LLAMA_3
    return "/".join(name.split("/")[:2])


def is_kimi(repository: str) -> bool:
    """Returns whether a repository has a ``tiktoken.model`` and code, instead of a ``tokenizer.json``.

    >>> is_kimi("moonshotai/Kimi-K2-Thinking"), is_kimi("Qwen/Qwen3-8B")
    (True, False)
    """
    return repository.startswith("moonshotai/Kimi-K2")


def pinned_revision(repository: str) -> str | None:
    """Returns the tested revision of a repository whose latest one may be incompatible; None for all others."""
    return _PINNED.get(repository)
