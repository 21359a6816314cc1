"""Group-relative policy optimization: several answers per prompt, with advantages relative to the group.

With ``kl_coef`` β > 0 the policy is also kept near the reference, the model that the run starts from. For a sampled token
with log-probability q under the policy and ρ under the reference, δ = q − ρ is an unbiased estimate of the KL divergence
KL(policy ‖ reference) at its position, in nats. Its gradient is estimated by δ·∇log π, so each token of an answer with
advantage A is trained with the advantage

    A − β(δ − δ̄),

where δ̄, the mean of δ over all answer tokens of the step, is a baseline that reduces the variance; it is the metric ``kl``.
All of it is divided by the number of answers of the step, as without the penalty.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from tinkex.errors import ConfigError
from tinkex.train.data import TrainingData
from tinkex.train.examples import Messages, Prompt, last_text
from tinkex.train.packing import placeholders
from tinkex.train.recipes import Metrics, PreparedStep, RunContext, collect, sample_greedy
from tinkex.train.rendering import Renderer
from tinkex.train.settings import GrpoSettings

if TYPE_CHECKING:
    from tinkex.types import Datum, Rollout, SampledSequence

__all__ = ["Grpo", "advantages", "token_advantages"]

MIN_LOG_RATIO = 1e-3
"""Smaller log ratios are rounding errors. An answer without an advantage or a larger one is not trained on: Adam would scale
the rounding errors up to whole steps."""


@dataclass(frozen=True)
class _Task:
    prompt: Prompt
    tokens: list[int]


@dataclass(frozen=True)
class _ScoredAnswer:
    """A sampled answer; ``batch`` is the number of its batch in the step."""

    batch: int
    task: _Task
    sequence: SampledSequence
    scores: Metrics
    advantage: float

    @property
    def ids(self) -> list[int]:
        return [*self.task.tokens, *self.sequence.tokens]

    @property
    def logprobs(self) -> Sequence[float]:
        if self.sequence.logprobs is None:
            raise ConfigError("this server returns no logprobs of sampled tokens, which GRPO needs")
        return self.sequence.logprobs


def advantages(rewards: Sequence[float], *, normalize: bool) -> list[float]:
    """Returns each answer's reward minus the group's mean, divided by the standard deviation if ``normalize``.

    >>> advantages([1.0, 0.0, 0.0, 1.0], normalize=False)
    [0.5, -0.5, -0.5, 0.5]
    >>> advantages([1.0, 0.0, 0.0, 1.0], normalize=True)
    [1.0, -1.0, -1.0, 1.0]
    """
    mean = sum(rewards) / len(rewards)
    centered = [reward - mean for reward in rewards]
    spread = (sum(one * one for one in centered) / len(centered)) ** 0.5
    return [one / spread for one in centered] if normalize and spread > 0 else centered


def token_advantages(
    advantage: float, log_ratios: Sequence[float], mean_log_ratio: float, kl_coef: float
) -> list[float]:
    """Returns the advantage of every token of an answer: the answer's, minus the KL penalty of the token.

    >>> token_advantages(1.0, [0.5, 0.0], mean_log_ratio=0.25, kl_coef=0.1)
    [0.975, 1.025]
    """
    return [advantage - kl_coef * (one - mean_log_ratio) for one in log_ratios]


class Grpo:
    """GRPO; answers are sampled at temperature 1 from the current weights, so their logprobs are on-policy."""

    headline = "reward"

    def __init__(self, settings: GrpoSettings, data: TrainingData[Prompt], renderer: Renderer) -> None:
        assert data.reward is not None, "read_data sets it"
        self._settings, self._renderer, self._reward = settings, renderer, data.reward
        self.prompts: Sequence[Messages | str] = [one.prompt for one in [*data.held_out, *data.examples]]
        self._learn = self._render(data.examples)
        self._check = data.held_out

    @property
    def token_counts(self) -> Sequence[int]:
        """The largest number of tokens of each prompt's group of answers."""
        settings = self._settings
        return [settings.group_size * (len(task.tokens) + settings.max_tokens) for task in self._learn]

    def sequences(self, place: int) -> Sequence[Sequence[int]]:
        """The prompt with the longest possible answers, whose tokens are not known yet."""
        settings, prompt = self._settings, self._learn[place].tokens
        return [
            [*prompt, *placeholders((place * settings.group_size + number) * settings.max_tokens, settings.max_tokens - 1)]
            for number in range(settings.group_size)
        ]  # fmt: skip

    def prepare(self, context: RunContext, batches: Sequence[Sequence[int]], step: int) -> PreparedStep:
        """Samples and scores groups; trains on the answers that have an advantage, or have left the reference."""
        settings = self._settings
        answers = self._sample(context, batches, step)
        log_ratios, kl = self._log_ratios(context, answers)
        context.rollouts(step, lambda: self._rollouts(answers, log_ratios, kl))
        by_batch = groupby(zip(answers, log_ratios, strict=True), key=lambda one: one[0].batch)
        passes = [list(self._data(batch, kl, len(answers))) for _, batch in by_batch]
        lengths = [len(answer.sequence.tokens) for answer in answers]
        num_prompt_tokens = sum(len(answer.task.tokens) for answer in answers)
        summary = {
            **_means([answer.scores for answer in answers]),
            "answer_tokens": sum(lengths) / len(lengths),
            "used_answers": sum(answer.advantage != 0 for answer in answers) / len(answers),
            "num_tokens": float(sum(lengths) + num_prompt_tokens),
        }
        if settings.kl_coef:
            summary["kl"] = kl
        if not any(passes):  # every group has equal rewards: all advantages are zero
            summary["loss"] = 0.0
        return PreparedStep(passes, settings.loss, summary)

    def _data(
        self, batch: Iterable[tuple[_ScoredAnswer, Sequence[float]]], kl: float, num_answers: int
    ) -> Iterator[Datum]:
        for answer, ratios in batch:
            if answer.advantage or any(abs(ratio) > MIN_LOG_RATIO for ratio in ratios):
                relative = token_advantages(answer.advantage, ratios, kl, self._settings.kl_coef)
                yield _datum(answer, [one / num_answers for one in relative])

    def _rollouts(
        self, answers: Sequence[_ScoredAnswer], log_ratios: Sequence[Sequence[float]], kl: float
    ) -> list[Rollout]:
        """Returns the answers of a step for the records of the server."""
        from tinkex import types

        groups: dict[int, str] = {}
        return [
            types.Rollout(
                group=groups.setdefault(id(answer.task), str(len(groups))),
                prompt_tokens=answer.task.tokens,
                tokens=list(answer.sequence.tokens),
                logprobs=list(answer.logprobs),
                advantages=token_advantages(answer.advantage, ratios, kl, self._settings.kl_coef),
                reward=answer.scores["reward"],
                advantage=answer.advantage,
                prompt=last_text(answer.task.prompt.prompt),
                text=self._renderer.tokenizer.decode(answer.sequence.tokens, skip_special_tokens=True),
                metrics={name: value for name, value in answer.scores.items() if name != "reward"} or None,
            )
            for answer, ratios in zip(answers, log_ratios, strict=True)
        ]

    def _sample(
        self, context: RunContext, batches: Sequence[Sequence[int]], step: int
    ) -> list[_ScoredAnswer]:
        """Returns scored groups of answers to the prompts of all batches, from the weights before the step."""
        from tinkex import types

        settings = self._settings
        sampler = context.training.save_weights_and_get_sampling_client()
        tasks = [(number, self._learn[place]) for number, batch in enumerate(batches) for place in batch]
        futures = [
            sampler.sample(
                types.ModelInput.from_ints(task.tokens),
                settings.group_size,
                types.SamplingParams(max_tokens=settings.max_tokens, seed=_seed(settings.seed, step, place)),
            )
            for place, (_, task) in enumerate(tasks)
        ]
        answers: list[_ScoredAnswer] = []
        responses = collect(futures, f"drawing answers for step {step}", context.progress)
        for (number, task), response in zip(tasks, responses, strict=True):
            scores = [self._score(task, sequence) for sequence in response.sequences]
            relative = advantages([one["reward"] for one in scores], normalize=settings.normalize_advantages)
            answers += [
                _ScoredAnswer(number, task, *each)
                for each in zip(response.sequences, scores, relative, strict=True)
            ]
        return answers

    def _log_ratios(
        self, context: RunContext, answers: Sequence[_ScoredAnswer]
    ) -> tuple[list[list[float]], float]:
        """Returns q − ρ of every answer token, and the mean of all; without a KL penalty zeros."""
        from tinkex import types

        if not self._settings.kl_coef:
            return [[0.0] * len(answer.sequence.tokens) for answer in answers], 0.0
        futures = [
            context.initial.compute_logprobs(types.ModelInput.from_ints(answer.ids)) for answer in answers
        ]
        found = collect(futures, "logprobs of the reference model", context.progress)
        ratios = [
            [q - rho for q, rho in zip(answer.logprobs, _answer_logprobs(all_, answer), strict=True)]
            for answer, all_ in zip(answers, found, strict=True)
        ]
        return ratios, math.fsum(one for each in ratios for one in each) / max(1, sum(map(len, ratios)))

    def evaluate(self, context: RunContext) -> Metrics | None:
        """Returns the mean reward of greedy answers to held-out prompts."""
        if not self._check:
            return None
        sampler = context.training.save_weights_and_get_sampling_client()
        prompts = [one.prompt for one in self._check]
        answers = sample_greedy(
            sampler,
            self._renderer,
            prompts,
            self._settings.max_tokens,
            phase="evaluating",
            progress=context.progress,
        )
        return _means(
            [
                self._reward.score(last_text(one.prompt), answer, one.fields)
                for one, answer in zip(self._check, answers, strict=True)
            ]
        )

    def _score(self, task: _Task, sequence: SampledSequence) -> Metrics:
        text = self._renderer.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        return self._reward.score(last_text(task.prompt.prompt), text, task.prompt.fields)

    def _render(self, prompts: Sequence[Prompt]) -> list[_Task]:
        settings = self._settings
        room = settings.max_length - settings.max_tokens
        tasks: list[_Task] = []
        for one in prompts:
            tokens = self._renderer.prompt(one.prompt)
            if len(tokens) <= room:
                tasks.append(_Task(one, tokens))
            elif settings.too_long == "error":
                raise ConfigError(
                    f"{one.where}: the prompt has {len(tokens)} tokens, but only {room} fit before an answer of "
                    f"{settings.max_tokens}. Raise --max-length, or use --too-long skip or cut."
                )
            elif settings.too_long == "cut" and room > 0:
                tasks.append(_Task(one, tokens[-room:]))
        if not tasks:
            raise ConfigError("no prompt leaves room for an answer; raise --max-length or lower --max-tokens")
        return tasks


def _datum(answer: _ScoredAnswer, own_advantages: Sequence[float]) -> Datum:
    from tinkex import types

    padding = [0.0] * (len(answer.task.tokens) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(answer.ids[:-1]),
        loss_fn_inputs={
            "target_tokens": answer.ids[1:],
            "logprobs": [*padding, *answer.logprobs],
            "advantages": [*padding, *own_advantages],
        },
    )


def _answer_logprobs(logprobs: Sequence[float | None], answer: _ScoredAnswer) -> list[float]:
    """Returns the reference's logprobs of the answer's tokens, from those of prompt and answer."""
    own = logprobs[len(answer.task.tokens) :]
    if any(one is None for one in own):
        raise ConfigError("this server returns no logprobs of a prompt's tokens, which --kl-coef needs")
    return [one for one in own if one is not None]


def _means(scores: Sequence[Metrics]) -> dict[str, float]:
    return {name: sum(one[name] for one in scores) / len(scores) for name in scores[0]}


def _seed(seed: int, step: int, place: int) -> int:
    """Returns a different seed for every group, and the same one when a run is repeated or resumed."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}:{place}".encode()).digest()[:4]) >> 1
