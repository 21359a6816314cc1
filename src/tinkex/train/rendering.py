"""Renders texts and chats as tokens, with the loss mask of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinkex.errors import ConfigError
from tinkex.train.examples import Answer, Messages

if TYPE_CHECKING:
    from tinkex.tokenizers import Tokenizer
    from tinkex.types import Datum

__all__ = ["Renderer", "TokenizedExample"]


@dataclass(frozen=True)
class TokenizedExample:
    """A text as tokens, with a loss mask."""

    ids: list[int]
    learned: list[bool]

    @property
    def num_learned(self) -> int:
        """The number of tokens with a loss."""
        return sum(self.learned)

    def datum(self, weight: float = 1.0) -> Datum:
        """Returns the training datum: inputs without the last token, targets shifted by one, with this weight."""
        from tinkex import types

        return types.Datum(
            model_input=types.ModelInput.from_ints(self.ids[:-1]),
            loss_fn_inputs={
                "target_tokens": self.ids[1:],
                "weights": [weight if learned else 0.0 for learned in self.learned[1:]],
            },
        )

    def cut(self, max_length: int) -> TokenizedExample:
        """Truncates to ``max_length`` tokens."""
        return TokenizedExample(self.ids[:max_length], self.learned[:max_length])


class Renderer:
    """Renders prompts and answers as tokens, with the model's chat template or as plain text.

    Prompts are encoded separately, as in sampling, so that an answer is trained after exactly the tokens that precede
    it in sampling.
    """

    def __init__(self, tokenizer: Tokenizer, chat: bool | None = None) -> None:
        self.tokenizer = tokenizer
        has_template = getattr(tokenizer, "chat_template", None) is not None
        if chat and not has_template:
            raise ConfigError("this model has no chat template; remove --chat (chat=True)")
        self.chat = has_template if chat is None else chat
        eos = getattr(tokenizer, "eos_token", None)
        self._eos = eos if isinstance(eos, str) else ""

    def prompt(self, prompt: Messages | str, tools: Messages | None = None) -> list[int]:
        """Returns the tokens of a prompt, up to the start of the answer."""
        if isinstance(prompt, str) and not self.chat:
            return self._encode(prompt, special=True)
        return self._encode(self._template(self._messages(prompt), tools, prompt=True))

    def pair(self, prompt: Messages | str, answer: Answer, tools: Messages | None = None) -> TokenizedExample:
        """Returns a prompt and its answer; the answer has a loss, up to its end token."""
        prompt_ids = self.prompt(prompt, tools)
        if isinstance(prompt, str) and not self.chat:
            if not isinstance(answer, str):
                raise ConfigError("an answer that calls tools needs a chat template; use another model")
            end = self.tokenizer.eos_token_id
            reply = [*self._encode(answer), *([] if end is None else [end])]
        else:
            reply = self._encode(self._answer_text(self._messages(prompt), answer, tools))
        return TokenizedExample(prompt_ids + reply, [False] * len(prompt_ids) + [True] * len(reply))

    def all_answers(self, messages: Messages, tools: Messages | None = None) -> TokenizedExample:
        """Returns a whole chat; every assistant message has a loss."""
        ids: list[int] = []
        learned: list[bool] = []
        done = ""
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._template(messages[:place], tools, prompt=True)
            after = self._template(messages[: place + 1], tools, prompt=False)
            if not (before.startswith(done) and after.startswith(before)):
                raise ConfigError(
                    "this model's chat template renders earlier turns differently when later ones follow, so they cannot "
                    "be trained together; train on the last answer only (--train-on last)"
                )
            answer = self._up_to_end(after[len(before) :])
            for text, is_answer in ((before[len(done) :], False), (answer, True)):
                tokens = self._encode(text)
                ids += tokens
                learned += [is_answer] * len(tokens)
            done = before + answer
        return TokenizedExample(ids, learned)

    def _messages(self, prompt: Messages | str) -> Messages:
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        if not self.chat:
            raise ConfigError(
                "the data contains chats, but this model has no chat template; use plain text, or another model"
            )
        return prompt

    def _template(self, messages: Messages, tools: Messages | None = None, *, prompt: bool) -> str:
        try:
            text: Any = self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, tokenize=False
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"the model's chat template rejects a chat: {error}") from error
        if tools or any("tool_calls" in message for message in messages):
            self._check_tools(messages, tools, str(text))
        return str(text)

    def _check_tools(self, messages: Messages, tools: Messages | None, text: str) -> None:
        """Rejects a template that leaves out tools or tool calls: the model would learn answers without their reason."""
        for what, chat, given in (
            ("tools", messages, None),
            ("tool calls", [{k: v for k, v in one.items() if k != "tool_calls"} for one in messages], tools),
        ):
            if (chat, given) == (messages, tools):
                continue
            plain: Any = self.tokenizer.apply_chat_template(chat, tools=given, tokenize=False)
            if text.startswith(str(plain)):  # it may end with the start of the answer
                raise ConfigError(
                    f"the model's chat template does not render {what}; use a model whose template does"
                )

    def _answer_text(self, prompt: Messages, answer: Answer, tools: Messages | None) -> str:
        before = self._template(prompt, tools, prompt=True)
        message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        whole = self._template([*prompt, message], tools, prompt=False)
        if not isinstance(answer, str) and not whole.startswith(before):
            raise ConfigError(
                "this model's chat template renders a prompt differently once a tool call follows it"
            )
        # Some templates render the prompt differently once it is answered; then the answer is appended directly.
        return self._up_to_end(whole[len(before) :]) if whole.startswith(before) else f"{answer}{self._eos}"

    def _up_to_end(self, text: str) -> str:
        """Truncates after the end token: sampling stops there, so the model never sees what follows."""
        return text[: text.rindex(self._eos) + len(self._eos)] if self._eos and self._eos in text else text

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=special))


def filter_by_length(
    rendered: Sequence[tuple[str, TokenizedExample]], max_length: int, too_long: str
) -> list[TokenizedExample]:
    """Returns the examples within ``max_length``; longer ones raise an error, are skipped or cut, by ``too_long``."""
    kept: list[TokenizedExample] = []
    long: list[tuple[str, int]] = []
    for where, tokens in rendered:
        if len(tokens.ids) <= max_length:
            kept.append(tokens)
            continue
        long.append((where, len(tokens.ids)))
        if too_long == "cut" and (cut := tokens.cut(max_length)).num_learned:
            kept.append(cut)
    if long and too_long == "error":
        where, length = long[0]
        lines = "line" if len(long) == 1 else "lines"
        raise ConfigError(
            f"{where}: {length} tokens exceed the limit of {max_length} ({len(long)} such {lines}). "
            "Raise --max-length, or use --too-long skip or cut."
        )
    if not kept:
        raise ConfigError(f"every example has more than {max_length} tokens; raise --max-length")
    return kept
