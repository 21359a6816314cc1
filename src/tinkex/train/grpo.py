"""Group-relative policy optimization: several answers per prompt, with advantages relative to the group."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinkex.errors import ConfigError
from tinkex.train.examples import Messages, Prompt, read_prompts, split
from tinkex.train.recipes import Metrics, PreparedStep, RunContext, sample_greedy
from tinkex.train.rewards import Reward, load_reward, pattern_reward
from tinkex.train.settings import GrpoSettings

if TYPE_CHECKING:
    from tinkex.types import Datum, SampledSequence

__all__ = ["Grpo", "advantages"]


@dataclass(frozen=True)
class _Task:
    prompt: Prompt
    tokens: list[int]


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


class Grpo:
    """GRPO; answers are sampled at temperature 1 from the current weights, so their logprobs are on-policy."""

    headline = "reward"

    def __init__(self, settings: GrpoSettings, context: RunContext) -> None:
        self._context = context
        self._settings = settings
        self._reward = _reward(settings)
        learn = read_prompts(settings.data)
        check: list[Prompt] = []
        if settings.eval_data is not None:
            check = read_prompts(settings.eval_data)
        else:
            learn, check = split(learn, settings.eval_fraction, settings.seed)
        self._learn = self._render(learn)
        self._check = check
        self._shown = [one.prompt for one in [*check, *learn]]

    @property
    def num_examples(self) -> int:
        """The number of training prompts."""
        return len(self._learn)

    @property
    def prompts(self) -> Sequence[Messages | str]:
        """Prompts of the data, held-out ones first."""
        return self._shown

    def prepare(self, batch: Sequence[int], step: int) -> PreparedStep:
        """Samples and scores groups; trains on answers with a non-zero advantage."""
        from tinkex import types

        settings = self._settings
        sampler = self._context.training.save_weights_and_get_sampling_client()
        tasks = [self._learn[place] for place in batch]
        futures = [
            sampler.sample(
                types.ModelInput.from_ints(task.tokens),
                settings.group_size,
                types.SamplingParams(max_tokens=settings.max_tokens, seed=_seed(settings.seed, step, place)),
            )
            for place, task in enumerate(tasks)
        ]
        data: list[Datum] = []
        rewards: list[float] = []
        lengths: list[int] = []
        for task, future in zip(tasks, futures, strict=True):
            sequences = future.result().sequences
            group = [self._score(task, sequence) for sequence in sequences]
            rewards += group
            lengths += [len(sequence.tokens) for sequence in sequences]
            for sequence, advantage in zip(
                sequences, advantages(group, normalize=settings.normalize_advantages), strict=True
            ):
                if advantage:
                    data.append(_datum(task.tokens, sequence, advantage / len(tasks) / settings.group_size))
        summary = {
            "reward": sum(rewards) / len(rewards),
            "answer_tokens": sum(lengths) / len(lengths),
            "used_answers": len(data) / len(rewards),
            "num_tokens": float(sum(lengths) + settings.group_size * sum(len(task.tokens) for task in tasks)),
        }
        if not data:  # every group has equal rewards: all advantages are zero
            summary["loss"] = 0.0
        return PreparedStep(data, settings.loss, summary)

    def evaluate(self) -> Metrics | None:
        """Returns the mean reward of greedy answers to held-out prompts."""
        if not self._check:
            return None
        sampler = self._context.training.save_weights_and_get_sampling_client()
        prompts = [one.prompt for one in self._check]
        answers = sample_greedy(sampler, self._context.renderer, prompts, self._settings.max_tokens)
        scores = [
            self._reward(_as_text(one.prompt), answer, one.fields)
            for one, answer in zip(self._check, answers, strict=True)
        ]
        return {"reward": sum(scores) / len(scores)}

    def _score(self, task: _Task, sequence: SampledSequence) -> float:
        text = self._context.renderer.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        return self._reward(_as_text(task.prompt.prompt), text, task.prompt.fields)

    def _render(self, prompts: Sequence[Prompt]) -> list[_Task]:
        settings = self._settings
        room = settings.max_length - settings.max_tokens
        tasks: list[_Task] = []
        for one in prompts:
            tokens = self._context.renderer.prompt(one.prompt)
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


def _reward(settings: GrpoSettings) -> Reward:
    if settings.reward is not None:
        return load_reward(settings.reward)
    assert settings.reward_regex is not None, "the settings are checked"
    return pattern_reward(settings.reward_regex)


def _datum(prompt: Sequence[int], sequence: SampledSequence, advantage: float) -> Datum:
    from tinkex import types

    if sequence.logprobs is None:
        raise ConfigError("this server returns no logprobs of sampled tokens, which GRPO needs")
    tokens = [*prompt, *sequence.tokens]
    padding = [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [*padding, *sequence.logprobs],
            "advantages": [*padding, *([advantage] * len(sequence.tokens))],
        },
    )


def _as_text(prompt: Messages | str) -> str:
    """Returns the prompt for the reward function: the text, or the last message of a chat."""
    if isinstance(prompt, str):
        return prompt
    last: Any = prompt[-1]["content"]
    return str(last)


def _seed(seed: int, step: int, place: int) -> int:
    """Returns a different seed for every group, and the same one when a run is repeated or resumed."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}:{place}".encode()).digest()[:4]) >> 1
