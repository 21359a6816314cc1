"""Runs a task on a model: samples answers, or ranks choices by their logprobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex.errors import BadRequestError, ConfigError
from tinkex.evaluation.results import ItemResult, TaskResult
from tinkex.evaluation.tasks import Prompt, Task, TaskItem
from tinkex.tokenizers.conversation import end_of_turn
from tinkex.train.rendering import Renderer
from tinkex.types import ModelInput, SamplingParams

if TYPE_CHECKING:
    from tinkex.clients.sampling import SamplingClient
    from tinkex.futures import APIFuture
    from tinkex.tokenizers import Tokenizer
    from tinkex.types import SampleResponse

__all__ = ["EvaluationOptions", "continuation", "evaluate"]

T = TypeVar("T")

MAX_IN_FLIGHT = 64
"""Requests that are submitted before the first of them is awaited."""
DEFAULT_PARAMS = SamplingParams(max_tokens=64, temperature=0.0)


@dataclass(frozen=True)
class EvaluationOptions:
    """How a task is run.

    >>> EvaluationOptions(limit=100).params.temperature
    0.0
    """

    params: SamplingParams = field(default_factory=lambda: DEFAULT_PARAMS)
    """Of sampled answers. Item ``i`` uses the seed plus ``i``, so that items do not share random numbers."""
    num_samples: int = 1
    """Answers per item; its score is their mean."""
    chat: bool | None = None
    """Whether text prompts are sent as messages; None: if the model has a chat template."""
    limit: int | None = None
    """Use the first items only."""


def evaluate(
    task: Task,
    model: str,
    sampler: SamplingClient,
    options: EvaluationOptions | None = None,
    on_item: Callable[[], None] = lambda: None,
) -> TaskResult:
    """Returns the results of a model on a task; ``model`` is its name in tables. Calls ``on_item`` after every item.

    ::

        result = evaluate(read_task("sums.jsonl"), "base", sampler, EvaluationOptions(limit=100))
        print(sum(result.scores("exact_match")))
    """
    options = options or EvaluationOptions()
    renderer = Renderer(sampler.get_tokenizer(), options.chat)
    items = task.items[: options.limit]
    run = _sampled if task.samples_answers else _ranked
    results: list[ItemResult] = []
    for result in run(task, items, sampler, renderer, options):
        results.append(result)
        on_item()
    return TaskResult(task.name, model, results)


def _sampled(
    task: Task,
    items: Sequence[TaskItem],
    sampler: SamplingClient,
    renderer: Renderer,
    options: EvaluationOptions,
) -> Iterator[ItemResult]:
    tokenizer, params = renderer.tokenizer, options.params
    if renderer.chat and params.stop is None and (ends := end_of_turn(tokenizer)):
        params = params.model_copy(update={"stop": ends})

    def submit(place: int) -> APIFuture[SampleResponse]:
        seed = None if params.seed is None else params.seed + place
        prompt = _prompt_tokens(renderer, items[place])
        return sampler.sample(
            ModelInput.from_ints(prompt), options.num_samples, params.model_copy(update={"seed": seed})
        )

    responses = in_order(submit, range(len(items)))
    for item in items:
        response = _next_of(item, responses)
        answers = [
            tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in response.sequences
        ]
        scores = [score_answer(task, item, answer) for answer in answers]
        yield ItemResult(
            {METRICS[task.kind]: sum(scores) / len(scores)},
            {
                "prompt": item.prompt,
                "answers": answers,
                "scores": scores,
                "stop_reasons": [sequence.stop_reason for sequence in response.sequences],
                "expected": _expected(item),
            },
        )


def _ranked(
    task: Task,
    items: Sequence[TaskItem],
    sampler: SamplingClient,
    renderer: Renderer,
    options: EvaluationOptions,
) -> Iterator[ItemResult]:
    del task, options
    lengths: list[int] = []

    def submit(pair: tuple[TaskItem, str]) -> APIFuture[list[float | None]]:
        item, choice = pair
        tokens, length = _with_choice(renderer, item, choice)
        lengths.append(length)
        return sampler.compute_logprobs(ModelInput.from_ints(tokens))

    pairs = ((item, choice) for item in items for choice in item.choices)
    logprobs = in_order(submit, pairs)
    position = 0
    for item in items:
        totals: list[float] = []
        for _ in item.choices:
            found = _next_of(item, logprobs)[-lengths[position] :]
            totals.append(sum(logprob for logprob in found if logprob is not None))
            position += 1
        per_character = [total / len(choice) for total, choice in zip(totals, item.choices, strict=True)]
        best, best_per_character = (max(range(len(each)), key=each.__getitem__) for each in (totals, per_character))  # fmt: skip
        yield ItemResult(
            {
                "accuracy": float(best == item.correct),
                "accuracy_norm": float(best_per_character == item.correct),
            },
            {
                "prompt": item.prompt,
                "choices": list(item.choices),
                "logprobs": totals,
                "answer": item.choices[best],
                "expected": item.choices[item.correct],
            },
        )


METRICS = {"exact": "exact_match", "regex": "regex_match", "scorer": "score"}


def score_answer(task: Task, item: TaskItem, answer: str) -> float:
    """Returns the score of one sampled answer.

    >>> sea = TaskItem("sea.jsonl:1", "Where?", {}, answers=["The sea."])
    >>> score_answer(Task("sea", "exact", [sea]), sea, " The sea.")
    1.0
    """
    if task.kind == "exact":
        return float(answer.strip() in item.answers)
    if task.kind == "regex":
        assert item.pattern is not None, "read_task compiles it"
        return float(item.pattern.search(answer) is not None)
    assert task.scorer is not None, "read_task loads it"
    return task.scorer(_prompt_text(item.prompt), answer, item.fields)


def continuation(
    tokenizer: Tokenizer, prompt: str, text: str, *, add_special_tokens: bool = True
) -> tuple[list[int], int]:
    """Returns the tokens of a prompt that a text continues, and how many of them are the text's.

    White space at the end of the prompt counts as part of the text, because tokens start with it.
    """
    stripped = prompt.rstrip()
    text = prompt[len(stripped) :] + text
    before = tokenizer.encode(stripped, add_special_tokens=add_special_tokens)
    whole = tokenizer.encode(stripped + text, add_special_tokens=add_special_tokens)
    return whole, max(1, len(whole) - len(before))


def in_order(submit: Callable[[Any], APIFuture[T]], values: Iterable[Any]) -> Iterator[T]:
    """Submits values, some of them ahead, and yields the results in order; what is pending at an error is cancelled."""
    pending: deque[APIFuture[T]] = deque()
    try:
        for value in values:
            pending.append(submit(value))
            if len(pending) >= MAX_IN_FLIGHT:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.future().cancel()


def _next_of(item: TaskItem, results: Iterator[T]) -> T:
    """The next result, which is one of this item; a rejection by the server names the item."""
    try:
        return next(results)
    except BadRequestError as error:
        reason = error.body.get("detail", error) if isinstance(error.body, Mapping) else error
        raise ConfigError(f"{item.where}: {reason}") from error


def _prompt_tokens(renderer: Renderer, item: TaskItem) -> list[int]:
    try:
        return renderer.prompt(item.prompt)
    except ConfigError as error:
        raise ConfigError(f"{item.where}: {error}") from error


def _with_choice(renderer: Renderer, item: TaskItem, choice: str) -> tuple[list[int], int]:
    if isinstance(item.prompt, str) and not renderer.chat:
        return continuation(renderer.tokenizer, item.prompt, choice)
    answer = renderer.tokenizer.encode(choice, add_special_tokens=False)
    return [*_prompt_tokens(renderer, item), *answer], len(answer)


def _prompt_text(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def _expected(item: TaskItem) -> Any:
    if item.pattern is not None:
        return item.pattern.pattern
    return list(item.answers) or None
