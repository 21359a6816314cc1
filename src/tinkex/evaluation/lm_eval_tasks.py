"""Tasks of ``lm-eval``, where that is installed, on models of this client: local, on a server, or hosted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.errors import ConfigError, SetupError
from tinkex.evaluation.evaluate import continuation, in_order
from tinkex.evaluation.results import Score
from tinkex.evaluation.statistics import Z_95, Interval
from tinkex.types import ModelInput, SamplingParams

if TYPE_CHECKING:
    from tinkex.clients.sampling import SamplingClient
    from tinkex.futures import APIFuture
    from tinkex.tokenizers import Tokenizer
    from tinkex.types import SampleResponse

__all__ = ["LmEvalTasks", "lm_eval_scores", "read_lm_eval_tasks"]

DEFAULT_NEW_TOKENS = 256
"""What ``lm-eval`` uses for tasks that set no limit."""
BOOTSTRAP_ITERATIONS = 1000
GENERATION_OPTIONS = frozenset({"until", "max_gen_toks", "temperature", "do_sample", "top_p", "top_k"})


@dataclass(frozen=True)
class LmEvalTasks:
    """Tasks that exist, by name."""

    names: Sequence[str]
    manager: Any
    library: Any


def read_lm_eval_tasks(names: Sequence[str], include_path: Path | None = None) -> LmEvalTasks:
    """Finds tasks by name, among those of ``lm-eval`` and those in ``include_path``; raises if one does not exist.

    Example:
        >>> read_lm_eval_tasks(["arc_easy", "hellaswag"]).names
        ['arc_easy', 'hellaswag']
    """
    try:
        import lm_eval  # pyright: ignore[reportMissingImports]
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise SetupError(
            f"tasks of lm-eval need the package {error.name}; run: pip install lm-eval"
        ) from error
    try:
        manager = TaskManager(include_path=None if include_path is None else str(include_path))
    except Exception as error:  # a YAML file there may be anything
        raise ConfigError(f"lm-eval cannot read the tasks in {include_path}: {error}") from error
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        raise ConfigError(
            f"lm-eval has no task {unknown[0]!r}; list its tasks with: lm-eval ls tasks. "
            "Add the directory of your own with --lm-eval-path"
        )
    return LmEvalTasks(list(names), manager, lm_eval)


@dataclass(frozen=True)
class LmEvalOptions:
    """How the tasks are run."""

    limit: int | None = None
    seed: int = 0
    chat: bool = False
    """Whether prompts are rendered by the model's chat template; ``lm-eval`` does not by default."""
    max_context: int | None = None
    """The tokens that the model's context holds; longer prompts lose their beginning. None: nothing is cut."""


def lm_eval_scores(
    tasks: LmEvalTasks,
    model: str,
    sampler: SamplingClient,
    options: LmEvalOptions,
    on_item: Callable[[], None] = lambda: None,
) -> tuple[list[Score], list[dict[str, Any]]]:
    """Returns the scores of a model, and a record of every item. The intervals are those of lm-eval's standard errors."""
    runner = _ModelRunner(sampler, options, on_item)
    found = tasks.library.simple_evaluate(
        model=_as_lm(runner),
        tasks=list(tasks.names),
        limit=options.limit,
        task_manager=tasks.manager,
        bootstrap_iters=BOOTSTRAP_ITERATIONS,
        log_samples=True,
        apply_chat_template=options.chat,
        random_seed=options.seed,
        numpy_random_seed=options.seed,
        torch_random_seed=options.seed,
        fewshot_random_seed=options.seed,
    )
    records = [
        {"task": task, "model": model, "item": number, "sample": sample}
        for task, samples in found["samples"].items()
        for number, sample in enumerate(samples)
    ]
    return _scores(found, model), records


def _scores(found: Mapping[str, Any], model: str) -> list[Score]:
    scores = []
    for task, values in found["results"].items():
        count = found.get("n-samples", {}).get(task, {}).get("effective", 0)
        for key, value in values.items():
            metric, _, variant = key.partition(",")
            if not isinstance(value, int | float) or not variant or metric.endswith("_stderr"):
                continue
            error = values.get(f"{metric}_stderr,{variant}")
            interval = None
            if isinstance(error, int | float):
                interval = Interval(value - Z_95 * error, value + Z_95 * error)
            name = metric if variant == "none" else f"{metric} ({variant})"
            scores.append(Score(str(task), name, model, float(value), interval, "stderr", int(count)))
    return scores


class _ModelRunner:
    """The calls that ``lm-eval`` makes to a model."""

    def __init__(self, sampler: SamplingClient, options: LmEvalOptions, on_item: Callable[[], None]) -> None:
        self._sampler = sampler
        self._on_item = on_item
        self._options = options
        self.tokenizer: Tokenizer = sampler.get_tokenizer().result()
        starts = (getattr(self.tokenizer, "bos_token_id", None), self.tokenizer.eos_token_id)
        found = [int(token) for token in starts if token is not None]
        if not found:
            raise SetupError("this model's tokenizer has no token that starts a text, which lm-eval needs")
        self._prefix = found[0]

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """The logprob of each text after its context, and whether greedy sampling would give that text."""
        encoded = [self._encode(context, text) for context, text in pairs]
        results = []
        for (tokens, length), response in zip(encoded, in_order(self._score, encoded), strict=True):
            logprobs = (response.prompt_logprobs or [])[-length:]
            best = (response.topk_prompt_logprobs or [])[-length:]
            greedy = all(
                ranked is not None and ranked[0][0] == token
                for ranked, token in zip(best, tokens[-length:], strict=True)
            )
            results.append((sum(value or 0.0 for value in logprobs), greedy))
            self._on_item()
        return results

    def rolling_log_likelihoods(self, texts: Sequence[str]) -> list[float]:
        """The logprob of each whole text, in windows of the context; every token is predicted once."""
        results = []
        for text in texts:
            tokens = [self._prefix, *self.tokenizer.encode(text, add_special_tokens=False)]
            windows = rolling_windows(tokens, self._options.max_context)
            responses = in_order(self._score, windows)
            results.append(
                sum(
                    sum(value or 0.0 for value in (response.prompt_logprobs or [])[-length:])
                    for (_, length), response in zip(windows, responses, strict=True)
                )
            )
            self._on_item()
        return results

    def generate(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """The text after each prompt, up to one of the texts in ``until``."""
        answers = []
        for (_, options), response in zip(requests, in_order(self._generate, requests), strict=True):
            tokens = response.sequences[0].tokens
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            for stop in _until(options):
                text = text.split(stop)[0]
            answers.append(text)
            self._on_item()
        return answers

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """A chat as text."""
        return str(
            self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        )

    def _encode(self, context: str, text: str) -> tuple[list[int], int]:
        if not context:
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
            return self._cut([self._prefix, *tokens]), len(tokens)
        tokens, length = continuation(
            self.tokenizer, context, text, add_special_tokens=not self._options.chat
        )
        tokens = self._cut(tokens)
        return tokens, min(length, len(tokens) - 1)

    def _cut(self, tokens: list[int], room: int = 0) -> list[int]:
        limit = self._options.max_context
        return tokens if limit is None else tokens[-max(1, limit - room) :]

    def _score(self, encoded: tuple[list[int], int]) -> APIFuture[SampleResponse]:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        return self._sampler.sample(
            ModelInput.from_ints(encoded[0]), 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=1
        )

    def _generate(self, request: tuple[str, Mapping[str, Any]]) -> APIFuture[SampleResponse]:
        context, options = request
        unknown = sorted(set(options) - GENERATION_OPTIONS)
        if unknown:
            raise ConfigError(
                f"a task of lm-eval sets {unknown[0]!r} for generation, which is not supported; "
                f"supported: {', '.join(sorted(GENERATION_OPTIONS))}"
            )
        max_tokens = int(options.get("max_gen_toks", DEFAULT_NEW_TOKENS))
        samples = options.get("do_sample", "temperature" in options)
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=float(options.get("temperature", 1.0)) if samples else 0.0,
            top_p=float(options.get("top_p", 1.0)),
            top_k=int(options.get("top_k", -1)),
            stop=list(_until(options)) or None,
            seed=self._options.seed,
        )
        tokens = self.tokenizer.encode(context, add_special_tokens=not self._options.chat)
        return self._sampler.sample(ModelInput.from_ints(self._cut(tokens, max_tokens)), 1, params)


def rolling_windows(tokens: Sequence[int], max_context: int | None) -> list[tuple[list[int], int]]:
    """Returns windows of at most ``max_context`` tokens, each with how many of its last tokens are predicted in it.

    The first token is not predicted, every other one is once. The last window is as long as the others, for its context.

    >>> rolling_windows([0, 1, 2, 3, 4, 5], 4)
    [([0, 1, 2, 3], 3), ([2, 3, 4, 5], 2)]
    """
    size = len(tokens) if max_context is None else max_context
    windows = []
    done = 1
    while done < len(tokens):
        end = min(len(tokens), done - 1 + size)
        windows.append((list(tokens[max(0, end - size) : end]), end - done))
        done = end
    return windows


def _until(options: Mapping[str, Any]) -> Sequence[str]:
    until = options.get("until") or []
    return [until] if isinstance(until, str) else [text for text in until if text]


def _as_lm(runner: _ModelRunner) -> Any:
    """The runner as a model of ``lm-eval``, whose base class exists only where that is installed."""
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

    class TinkexLM(LM):  # type: ignore[misc]
        @property
        def tokenizer_name(self) -> str:
            return str(getattr(runner.tokenizer, "name_or_path", "tinkex"))

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            del disable_tqdm
            return runner.log_likelihoods([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            del disable_tqdm
            return runner.rolling_log_likelihoods([request.args[0] for request in requests])

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            del disable_tqdm
            return runner.generate([request.args for request in requests])

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            return runner.render(chat_history, add_generation_prompt=add_generation_prompt)

    return TinkexLM()
