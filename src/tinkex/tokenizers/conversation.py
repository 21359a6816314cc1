"""Conversations as prompts: the tokens of messages, those that end an answer, and the text of an answer that people see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tinkex.tokenizers.loading import Tokenizer

__all__ = ["end_of_turn", "has_chat_template", "render_conversation", "visible_text"]


def has_chat_template(tokenizer: Tokenizer) -> bool:
    """Whether the model's tokenizer has a chat template.

    Example:
        >>> has_chat_template(get_tokenizer("HuggingFaceTB/SmolLM2-135M-Instruct"))
        True
    """
    return getattr(tokenizer, "chat_template", None) is not None


def render_conversation(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the tokens of messages up to the start of the answer; raises ``SetupError`` if the template rejects them.

    Example:
        >>> render_conversation(tokenizer, [{"role": "user", "content": "Where?"}])[:3]
        [1, 4093, 198]
    """
    try:
        rendered = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, return_dict=False
        )
    except (ValueError, KeyError, TypeError) as error:
        raise SetupError(f"the chat template failed ({error})") from error
    return [int(token) for token in rendered]


def end_of_turn(tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that end an answer: the one that the chat template puts after it, and the end of text.

    Example:
        >>> end_of_turn(tokenizer)
        [0, 2]
    """
    probe = "answer"
    found = {tokenizer.eos_token_id}
    with suppress(ValueError, KeyError, TypeError):
        chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": probe}]
        rendered = str(tokenizer.apply_chat_template(chat, tokenize=False))
        after = tokenizer.encode(rendered.rpartition(probe)[2], add_special_tokens=False)
        if after and not tokenizer.decode(after[:1], skip_special_tokens=True):
            found.add(after[0])
    return sorted(token for token in found if token is not None)


def visible_text(tokenizer: Tokenizer, token: int, text: str, *, ends: bool) -> str:
    """Returns the text that a streamed token adds to an answer; special tokens, such as ``<|im_end|>``, add none.

    ``ends`` says whether the sequence stopped with this token: its text is then what was held back before it.

    Example:
        >>> visible_text(tokenizer, tokenizer.eos_token_id, "<|im_end|>", ends=False)
        ''
    """
    return text if ends or tokenizer.decode([token], skip_special_tokens=True) else ""
