"""Rollouts of a run: what was sampled in a step, group by group, with rewards and advantages."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.responses import Response

from tinkex.engine.api.dashboard.site import Visit
from tinkex.engine.store import RolloutRow
from tinkex.errors import InvalidInput, UnknownObject

if TYPE_CHECKING:
    from tinkex.engine.model.tokenizer import EngineTokenizer

MAX_ROLLOUTS = 64
"""Rollouts on one page."""
MAX_TOKENS = 2000
"""Tokens of one rollout that are shown."""
MAX_STEPS = 1000


@dataclass(frozen=True)
class ShownToken:
    """A token with what colours it: ``logprob`` and ``advantage`` as classes of 0 to 10."""

    text: str
    logprob: float | None
    advantage: float | None
    logprob_level: int | None
    advantage_level: int | None


@dataclass(frozen=True)
class ShownRollout:
    """A rollout as it is shown."""

    row: RolloutRow
    tokens: Sequence[ShownToken]
    num_hidden: int


@dataclass(frozen=True)
class ShownGroup:
    """The answers to one prompt."""

    name: str
    prompt: str
    rollouts: Sequence[ShownRollout]
    mean_reward: float | None


async def show_rollouts(visit: Visit) -> Response:
    """The page of one step; without a step, that of the last one."""
    run = visit.run(visit.parameters["run_id"])
    reader, owner = visit.site.rollouts, visit.owner
    steps = await visit.read(lambda: reader.steps(run.run_id, limit=MAX_STEPS, owner=owner))
    if not steps:
        return visit.page("rollouts.html", "runs", f"Rollouts of {run.title}", run=run, steps=[], step=None)
    numbers = [each.step for each in steps]
    text = visit.query.get("step", str(numbers[-1]))
    if not (text.isascii() and text.isdecimal()) or len(text) > 16:
        raise InvalidInput(f"step is {text[:50]!r}; give a whole number.")
    step = int(text)
    if step not in numbers:
        raise UnknownObject(
            f"run {run.run_id} has no rollouts of step {step}; it has those of {numbers[0]} to {numbers[-1]}."
        )
    rows = await visit.read(lambda: reader.of_step(run.run_id, step, limit=MAX_ROLLOUTS, owner=owner))
    histogram = await visit.read(lambda: reader.histogram(run.run_id, max_steps=120, owner=owner))
    groups = await visit.read(lambda: _groups(visit.site.tokenizer(run.base_model), rows))
    place = numbers.index(step)
    return visit.page(
        "rollouts.html",
        "runs",
        f"Rollouts of {run.title}",
        run=run,
        steps=steps,
        step=steps[place],
        previous=numbers[place - 1] if place else None,
        next=numbers[place + 1] if place + 1 < len(numbers) else None,
        groups=groups,
        num_left=steps[place].num_rollouts - len(rows),
        histogram=None
        if histogram is None
        else {"edges": histogram.edges, "steps": histogram.steps, "counts": histogram.counts},
    )


def _groups(tokenizer: EngineTokenizer | None, rows: Sequence[RolloutRow]) -> Sequence[ShownGroup]:
    names: dict[str, list[RolloutRow]] = {}
    for row in rows:
        names.setdefault(row.content.group or f"rollout {row.place}", []).append(row)
    groups = []
    for name, members in names.items():
        rewards = [row.reward for row in members if row.reward is not None]
        first = members[0].content
        prompt = first.prompt if first.prompt is not None else _text(tokenizer, first.prompt_tokens)
        mean = sum(rewards) / len(rewards) if rewards else None
        groups.append(ShownGroup(name, prompt, [_shown(tokenizer, row) for row in members], mean))
    return groups


def _shown(tokenizer: EngineTokenizer | None, row: RolloutRow) -> ShownRollout:
    content = row.content
    tokens = content.tokens[:MAX_TOKENS]
    if content.text is not None and not (tokens and tokenizer):
        return ShownRollout(row, [ShownToken(content.text, None, None, None, None)], 0)
    texts = _texts(tokenizer, tokens)
    advantages = content.advantages
    if advantages is None and row.advantage is not None:
        advantages = (row.advantage,) * len(content.tokens)
    largest = max((abs(each) for each in advantages or ()), default=0.0) or 1.0
    shown = []
    for place, text in enumerate(texts):
        logprob = _at(content.logprobs, place)
        advantage = _at(advantages, place)
        shown.append(
            ShownToken(
                text,
                logprob,
                advantage,
                None if logprob is None else _logprob_level(logprob),
                None if advantage is None else round(5 + 5 * max(-1.0, min(1.0, advantage / largest))),
            )
        )
    return ShownRollout(row, shown, len(content.tokens) - len(tokens))


def _logprob_level(logprob: float) -> int:
    """0 for a certain token, 10 for one with a logprob of −8 or less.

    >>> _logprob_level(0.0), _logprob_level(-4.0), _logprob_level(-100.0)
    (0, 5, 10)
    """
    return round(10 * min(max(-logprob, 0.0), 8.0) / 8.0)


def _at(values: Sequence[float] | None, place: int) -> float | None:
    if values is None or place >= len(values) or values[place] != values[place]:
        return None
    return values[place]


def _text(tokenizer: EngineTokenizer | None, tokens: Sequence[int]) -> str:
    if tokenizer is None:
        return "".join(_texts(None, tokens))
    return tokenizer.decode_bytes(tokens).decode("utf-8", "replace")


def _texts(tokenizer: EngineTokenizer | None, tokens: Sequence[int]) -> Sequence[str]:
    """The text of each token, or its number where it has none.

    A character that several tokens spell is the text of the last of them; a mark keeps the place of the others.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = []
    for token in tokens:
        content = tokenizer.decode_bytes([token]) if tokenizer is not None else b""
        texts.append((decoder.decode(content) or "▯") if content else f"‹{token}›")
    return texts
