"""The workload of the benchmark against TRL: the same tokens for both sides, as text that has exactly those tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["RANK", "Workload", "make_workload"]

RANK = 32
PROMPTS, ANSWERS, PROMPT_LENGTH, ANSWER_LENGTH = 4, 8, 128, 32
EXAMPLES, SFT_BATCH = 64, 8
PAIRS, CHOSEN_LENGTH = 4, 64


@dataclass(frozen=True)
class Workload:
    """Texts of the cases; ``tokenizer`` is a fast tokenizer with ``encode(text).ids``."""

    grpo_prompts: list[str]
    sft_texts: list[str]
    dpo_pairs: list[tuple[str, str, str]]
    """Prompt, chosen and rejected answer."""


def make_workload(tokenizer: Any) -> Workload:
    """Makes texts of whole words, each of which is one token, so that their lengths in tokens are known."""
    words = [word for token, word in _words(tokenizer)]
    rng = np.random.default_rng(3)

    def text(length: int) -> str:
        return "".join(words[i] for i in rng.integers(len(words), size=length))

    # From 16 to 256 tokens, most of them short, as in a file of chats.
    lengths = np.exp(rng.uniform(np.log(16), np.log(256), size=EXAMPLES)).astype(int)
    work = Workload(
        grpo_prompts=[text(PROMPT_LENGTH) for _ in range(PROMPTS)],
        sft_texts=[text(int(length)) for length in lengths],
        dpo_pairs=[(text(PROMPT_LENGTH), text(CHOSEN_LENGTH), text(CHOSEN_LENGTH)) for _ in range(PAIRS)],
    )
    for prompt in work.grpo_prompts:
        assert len(tokenizer.encode(prompt).ids) == PROMPT_LENGTH
    return work


def _words(tokenizer: Any) -> list[tuple[int, str]]:
    """The tokens that are one word with a space before it."""
    found = []
    for token in range(1000, 20_000):
        word = tokenizer.decode([token])
        if word.startswith(" ") and word[1:].isascii() and word[1:].isalpha() and len(word) > 3:
            found.append((token, word))
    return found
