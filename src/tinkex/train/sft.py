"""Supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence

from tinkex.train.examples import Conversation, Messages, read_conversations, split
from tinkex.train.recipes import Metrics, PreparedStep, RunContext
from tinkex.train.rendering import TokenizedExample, filter_by_length
from tinkex.train.settings import SftSettings

__all__ = ["Sft"]


class Sft:
    """Supervised fine-tuning; the loss is the mean cross-entropy per trained token."""

    headline = "loss"

    def __init__(self, settings: SftSettings, context: RunContext) -> None:
        self._context = context
        learn = read_conversations(settings.data)
        check: list[Conversation] = []
        if settings.eval_data is not None:
            check = read_conversations(settings.eval_data)
        else:
            learn, check = split(learn, settings.eval_fraction, settings.seed)
        self._shown = [one.prompt for one in [*check, *learn]]
        self._learn = self._render(learn, settings)
        self._check = self._render(check, settings) if check else []

    @property
    def num_examples(self) -> int:
        """The number of training examples."""
        return len(self._learn)

    @property
    def prompts(self) -> Sequence[Messages | str]:
        """Prompts of the data, held-out ones first."""
        return self._shown

    def prepare(self, batch: Sequence[int], step: int) -> PreparedStep:
        """Returns the examples of the batch."""
        del step
        chosen = [self._learn[place] for place in batch]
        num_learned = sum(tokens.num_learned for tokens in chosen)
        # The mean over the batch's tokens, so that the learning rate does not depend on the length of answers.
        return PreparedStep(
            [tokens.datum(1.0 / num_learned) for tokens in chosen],
            "cross_entropy",
            {"num_tokens": sum(len(tokens.ids) for tokens in chosen)},
        )

    def evaluate(self) -> Metrics | None:
        """Returns the loss on held-out examples."""
        if not self._check:
            return None
        num_learned = sum(tokens.num_learned for tokens in self._check)
        passed = self._context.training.forward([tokens.datum() for tokens in self._check], "cross_entropy")
        return {"loss": passed.result().metrics["loss:sum"] / num_learned}

    def _render(self, examples: Sequence[Conversation], settings: SftSettings) -> list[TokenizedExample]:
        renderer = self._context.renderer

        def tokens(one: Conversation) -> TokenizedExample:
            if settings.train_on == "all" and isinstance(one.prompt, list):
                return renderer.all_answers([*one.prompt, {"role": "assistant", "content": one.answer}])
            return renderer.pair(one.prompt, one.answer)

        return filter_by_length(
            [(one.where, tokens(one)) for one in examples], settings.max_length, settings.too_long
        )
