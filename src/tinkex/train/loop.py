"""The training loop of all recipes: batches, learning rate, evaluation, checkpoints, and resuming."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.errors import ConfigError
from tinkex.train.interrupts import CriticalSection, Interrupts
from tinkex.train.recipes import Metrics, PreparedStep, Recipe, RunContext, sample_greedy
from tinkex.train.rendering import Renderer
from tinkex.train.report import TrainingReport
from tinkex.train.run_directory import RunDirectory
from tinkex.train.settings import DpoSettings, GrpoSettings, Settings, SftSettings

if TYPE_CHECKING:
    from tinkex.clients.service import ServiceClient
    from tinkex.clients.training import TrainingClient
    from tinkex.train.examples import Messages
    from tinkex.types import AdamParams

__all__ = ["TrainingCallback", "batch_indices", "learning_rate", "resume", "run"]

MAX_IN_FLIGHT = 2
"""Maximum number of concurrent steps: the next batch is submitted while the server computes the last one."""
NUM_SHOWN_PROMPTS = 3


class TrainingCallback:
    """Receives the progress of a run; override the methods you need."""

    def started(self, total_steps: int, first_step: int, headline: str) -> None:
        """Called when training starts after ``first_step`` of ``total_steps``."""

    def stepped(self, step: int, metrics: Metrics) -> None:
        """Called after a step."""

    def evaluated(self, step: int, metrics: Metrics) -> None:
        """Called after an evaluation on held-out examples."""

    def saved(self, step: int, path: str) -> None:
        """Called after a checkpoint was saved."""

    def stopping(self, steps: int) -> None:
        """Called on Ctrl-C: ``steps`` steps are in flight, then the state is saved; a second Ctrl-C stops immediately."""

    def finished(self) -> None:
        """Called after the last step, also after an error."""


def run(
    service: ServiceClient, settings: Settings, watcher: TrainingCallback | None = None
) -> TrainingReport:
    """Trains with these settings and returns the report, which is also written to the output directory.

    On ``KeyboardInterrupt`` the state is saved first; :func:`resume` continues from there.
    """
    base_model = _base_model(service, settings)
    context = _create_context(service, settings, base_model, settings.start_from, with_optimizer=False)
    recipe = _recipe(settings, context)
    run_directory = RunDirectory.new(settings, base_model)
    return _Run(settings, context, recipe, run_directory, watcher or TrainingCallback()).go(0)


def resume(
    service: ServiceClient,
    directory: Path,
    watcher: TrainingCallback | None = None,
    *,
    recipe: str | None = None,
) -> TrainingReport:
    """Resumes a run from its last checkpoint: with the same batches, optimizer state and learning rates.

    A run without a checkpoint restarts from the beginning; for a complete run, returns its report again. Raises
    ``ConfigError`` if ``recipe`` is not the run's recipe.
    """
    run_directory, settings, base_model = RunDirectory.open(directory)
    if recipe is not None and settings.recipe != recipe:
        raise ConfigError(
            f"{directory} is a run of {settings.recipe}; resume it with: tinkex train {settings.recipe} --resume {directory}"
        )
    complete = TrainingReport.read(directory)
    if complete is not None:
        return complete
    saved = run_directory.checkpoints()
    step = int(saved[-1]["step"]) if saved else 0
    path = str(saved[-1]["path"]) if saved else settings.start_from
    context = _create_context(service, settings, base_model, path, with_optimizer=bool(saved))
    run_directory.rewind(step)
    return _Run(
        settings, context, _recipe(settings, context), run_directory, watcher or TrainingCallback()
    ).go(step)


class _Run:
    """One run, from its first or a later step to the end."""

    def __init__(
        self,
        settings: Settings,
        context: RunContext,
        recipe: Recipe,
        run_directory: RunDirectory,
        watcher: TrainingCallback,
    ) -> None:
        self._settings, self._context, self._recipe = settings, context, recipe
        self._directory, self._watcher = run_directory, watcher
        self._per_epoch = math.ceil(recipe.num_examples / settings.batch_size)
        self._total = settings.steps or self._per_epoch * settings.epochs
        self._pending: list[tuple[int, Callable[[], Metrics]]] = []
        self._submitted = 0
        self._critical = CriticalSection()

    def go(self, first: int) -> TrainingReport:
        before = self._before(first)
        began = time.monotonic()
        if first == 0:
            self._evaluate(0)
        self._watcher.started(self._total, first, self._recipe.headline)
        self._submitted = first
        try:
            with Interrupts() as interrupts:
                self._critical = interrupts.critical
                for step in range(first + 1, self._total + 1):
                    self._submit(step)
                    self._collect(MAX_IN_FLIGHT - 1)
                    self._evaluate_and_save(step)
                self._collect(0)
        except KeyboardInterrupt:
            self._watcher.stopping(len(self._pending))
            self._collect(0)
            self._save(self._submitted, f"step-{self._submitted:06d}")
            raise
        finally:
            self._watcher.finished()
        return self._report(before, time.monotonic() - began)

    def _submit(self, step: int) -> None:
        adam = self._adam(step)
        batch = batch_indices(self._recipe.num_examples, self._settings.batch_size, step, self._settings.seed)
        work = self._recipe.prepare(batch, step)
        with self._critical:  # else a checkpoint could contain a pass without its step, or an uncounted step
            self._pending.append((step, _submit_step(self._context.training, work, adam)))
            self._submitted = step

    def _evaluate_and_save(self, step: int) -> None:
        """Evaluates and saves a checkpoint after this step if due; the last ones follow in the report."""
        if step == self._total:
            return
        if step % (self._settings.eval_every or self._per_epoch) == 0:
            self._collect(0)
            self._evaluate(step)
        if self._settings.save_every is not None and step % self._settings.save_every == 0:
            self._collect(0)
            self._save(step, f"step-{step:06d}", self._settings.ttl_seconds)

    def _collect(self, leave: int) -> None:
        """Waits for steps until at most ``leave`` are in flight."""
        while len(self._pending) > leave:
            step, metrics = self._pending[0]
            found = metrics()
            for name, value in found.items():
                if not math.isfinite(value):
                    raise ConfigError(
                        f"{name} is {value} after step {step}; resume from an earlier checkpoint with a lower learning rate"
                    )
            with self._critical:  # recorded exactly once
                self._directory.add_step(step, dict(found))
                self._pending.pop(0)
            self._watcher.stepped(step, found)

    def _evaluate(self, step: int) -> None:
        found = self._recipe.evaluate()
        if found is not None:
            self._directory.add_step(step, {f"eval_{name}": value for name, value in found.items()})
            self._watcher.evaluated(step, found)

    def _save(self, step: int, name: str, ttl_seconds: int | None = None) -> str:
        path = self._context.training.save_state(name, ttl_seconds, overwrite=True).result().path
        self._directory.add_checkpoint(step, path)
        self._watcher.saved(step, path)
        return path

    def _adam(self, step: int) -> AdamParams:
        from tinkex import types

        rate = learning_rate(
            self._settings.learning_rate,
            step,
            self._total,
            self._settings.schedule,
            self._settings.warmup_steps,
        )
        return types.AdamParams(learning_rate=rate)

    def _prompts(self) -> list[Messages | str]:
        return [*self._settings.sample_prompts] or list(self._recipe.prompts[:NUM_SHOWN_PROMPTS])

    def _before(self, first: int) -> Sequence[str]:
        kept = self._directory.baseline()
        if first and kept is not None:
            return [str(answer) for answer in kept["answers"]]
        context, settings = self._context, self._settings
        if settings.start_from is not None:
            sampler = context.service.create_sampling_client(model_path=settings.start_from)
        else:
            sampler = context.service.create_sampling_client(base_model=context.base_model)
        answers = sample_greedy(sampler, context.renderer, self._prompts(), settings.sample_tokens)
        self._directory.save_baseline({"answers": answers})
        return answers

    def _report(self, before: Sequence[str], seconds: float) -> TrainingReport:
        self._directory.rewind(self._total, evaluations=False)  # drop those of a process killed at this point
        self._evaluate(self._total)
        sampler = self._context.training.save_weights_and_get_sampling_client()
        prompts = self._prompts()
        after = sample_greedy(sampler, self._context.renderer, prompts, self._settings.sample_tokens)
        path = self._save(self._total, "final")
        sampler_path = self._context.training.save_weights_for_sampler("final").result().path
        report = TrainingReport(
            recipe=self._settings.recipe,
            base_model=self._context.base_model,
            headline=self._recipe.headline,
            metrics=self._directory.steps(),
            samples=[
                {"prompt": _shown(prompt), "before": old, "after": new}
                for prompt, old, new in zip(prompts, before, after, strict=True)
            ],
            checkpoint=path,
            sampler_checkpoint=str(sampler_path),
            num_examples=self._recipe.num_examples,
            seconds=seconds,
            output=self._directory.directory,
        )
        report.write()
        return report


def _submit_step(training: TrainingClient, work: PreparedStep, adam: AdamParams) -> Callable[[], Metrics]:
    """Submits a step; returns a function that waits for it and returns its metrics."""
    if not work.data:
        return lambda: work.metrics
    passed = training.forward_backward(work.data, work.loss_fn)
    stepped = training.optim_step(adam)

    def metrics() -> Metrics:
        loss = passed.result().metrics["loss:sum"]
        stepped.result()
        return {"loss": loss, **work.metrics}

    return metrics


def batch_indices(num_examples: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Returns the indices of the examples of a step (from 1), shuffled in every epoch; the last batch may be smaller.

    >>> [batch_indices(3, 2, step, seed=0) for step in (1, 2)]
    [[1, 0], [2]]
    """
    per_epoch = math.ceil(num_examples / batch_size)
    epoch, index = divmod(step - 1, per_epoch)
    order = list(range(num_examples))
    random.Random(f"{seed}:{epoch}").shuffle(order)  # noqa: S311 -- repeatable on purpose
    return order[index * batch_size : (index + 1) * batch_size]


def learning_rate(peak: float, step: int, total: int, schedule: str, warmup_steps: int) -> float:
    """Returns the learning rate of a step (from 1): linear warm-up, then the schedule.

    >>> [round(learning_rate(1.0, step, 4, "linear", 0), 2) for step in (1, 2, 3, 4)]
    [1.0, 0.75, 0.5, 0.25]
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    left = 1.0 - (step - 1 - warmup_steps) / max(1, total - warmup_steps)
    if schedule == "linear":
        return peak * left
    return peak * (0.5 - 0.5 * math.cos(math.pi * left)) if schedule == "cosine" else peak


def _base_model(service: ServiceClient, settings: Settings) -> str:
    if settings.start_from is not None:
        info = service.create_rest_client().get_weights_info_by_tinker_path(settings.start_from).result()
        return info.base_model
    if settings.model is None:
        raise ConfigError("no model is set; choose one with --model (model=…)")
    return settings.model


def _create_context(
    service: ServiceClient, settings: Settings, base_model: str, path: str | None, *, with_optimizer: bool
) -> RunContext:
    training: TrainingClient
    if path is None:
        training = service.create_lora_training_client(base_model, rank=settings.rank, seed=settings.seed)
    elif with_optimizer:
        training = service.create_training_client_from_state_with_optimizer(path)
    else:
        training = service.create_training_client_from_state(path)
    return RunContext(service, training, Renderer(training.get_tokenizer(), settings.chat), base_model)


def _recipe(settings: Settings, context: RunContext) -> Recipe:
    from tinkex.train.dpo import Dpo
    from tinkex.train.grpo import Grpo
    from tinkex.train.sft import Sft

    if isinstance(settings, SftSettings):
        return Sft(settings, context)
    if isinstance(settings, DpoSettings):
        return Dpo(settings, context)
    if isinstance(settings, GrpoSettings):
        return Grpo(settings, context)
    raise ConfigError(
        f"{type(settings).__name__} has no recipe; use SftSettings, DpoSettings or GrpoSettings"
    )


def _shown(prompt: Messages | str) -> str:
    if isinstance(prompt, str):
        return prompt
    last: Mapping[str, Any] = prompt[-1]
    return str(last["content"])


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Loads a name of 0.1, with a ``DeprecationWarning``."""
        if name.startswith("__"):  # the import system looks up __path__
            raise AttributeError(name)
        from tinkex._moved import load_renamed

        return load_renamed(__name__, name)
