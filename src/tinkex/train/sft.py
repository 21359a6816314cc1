"""Supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence

from tinkex.train.data import TrainingData
from tinkex.train.examples import Conversation, Messages
from tinkex.train.recipes import Metrics, PreparedStep, RunContext
from tinkex.train.rendering import Renderer, TokenizedExample, filter_by_length
from tinkex.train.settings import SftSettings

__all__ = ["Sft"]


class Sft:
    """Supervised fine-tuning; the loss is the mean cross-entropy per trained token."""

    headline = "loss"

    def __init__(self, settings: SftSettings, data: TrainingData[Conversation], renderer: Renderer) -> None:
        self._renderer = renderer
        self.prompts: Sequence[Messages | str] = [one.prompt for one in [*data.held_out, *data.examples]]
        self._learn = self._render(data.examples, settings)
        self._check = self._render(data.held_out, settings) if data.held_out else []

    @property
    def token_counts(self) -> Sequence[int]:
        """The number of tokens of each training example."""
        return [len(tokens.ids) for tokens in self._learn]

    def sequences(self, place: int) -> Sequence[Sequence[int]]:
        """The tokens of an example, without the last one, which is only predicted."""
        return [self._learn[place].ids[:-1]]

    def prepare(self, context: RunContext, batches: Sequence[Sequence[int]], step: int) -> PreparedStep:
        """Returns the examples of the batches."""
        del context, step
        chosen = [[self._learn[place] for place in batch] for batch in batches]
        every = [tokens for batch in chosen for tokens in batch]
        num_learned = sum(tokens.num_learned for tokens in every)
        # The mean over the tokens of all batches: a step does not depend on how its examples are divided into batches,
        # nor the learning rate on the length of answers.
        return PreparedStep(
            [[tokens.datum(1.0 / num_learned) for tokens in batch] for batch in chosen],
            "cross_entropy",
            {"num_tokens": sum(len(tokens.ids) for tokens in every)},
        )

    def evaluate(self, context: RunContext) -> Metrics | None:
        """Returns the loss on held-out examples."""
        if not self._check:
            return None
        context.progress("evaluating", 0, 1)
        num_learned = sum(tokens.num_learned for tokens in self._check)
        passed = context.training.forward([tokens.datum() for tokens in self._check], "cross_entropy")
        return {"loss": passed.result().metrics["loss:sum"] / num_learned}

    def _render(self, examples: Sequence[Conversation], settings: SftSettings) -> list[TokenizedExample]:
        def tokens(one: Conversation) -> TokenizedExample:
            if settings.train_on == "all" and isinstance(one.prompt, list):
                answer = (
                    one.answer
                    if isinstance(one.answer, dict)
                    else {"role": "assistant", "content": one.answer}
                )
                return self._renderer.all_answers([*one.prompt, answer], one.tools)
            return self._renderer.pair(one.prompt, one.answer, one.tools)

        return filter_by_length(
            [(one.where, tokens(one)) for one in examples], settings.max_length, settings.too_long
        )
