"""Which hub repository holds the tokenizer of a model, by the model's name."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["hub_name", "is_kimi", "pinned_revision"]

LLAMA_3 = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
"""The tokenizer of all Llama 3 models, without the licence gate of their own repositories."""

_PINNED: Mapping[str, str] = {
    "moonshotai/Kimi-K2-Thinking": "612681931a8c906ddb349f8ad0f582cb552189cd",
}


def hub_name(model: str) -> str:
    """The hub repository that holds the tokenizer of a model name.

    A suffix after a colon and a variant after a second slash are the server's business; Llama 3 has a copy
    that everybody may read.

    >>> hub_name("Qwen/Qwen3-8B:peft:262144"), hub_name("moonshotai/Kimi-K2/base")
    ('Qwen/Qwen3-8B', 'moonshotai/Kimi-K2')
    """
    name = model.partition(":")[0]
    if name.startswith("meta-llama/Llama-3"):
        return LLAMA_3
    return "/".join(name.split("/")[:2])


def is_kimi(repository: str) -> bool:
    """Whether a repository holds a ``tiktoken.model`` and code, instead of a ``tokenizer.json``.

    >>> is_kimi("moonshotai/Kimi-K2-Thinking"), is_kimi("Qwen/Qwen3-8B")
    (True, False)
    """
    return repository.startswith("moonshotai/Kimi-K2")


def pinned_revision(repository: str) -> str | None:
    """The revision of a repository that is known to fit, where its newest one may not."""
    return _PINNED.get(repository)
