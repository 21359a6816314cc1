"""The training loop of all recipes: batches, learning rate, evaluation, checkpoints, and resuming."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.errors import BadRequestError, ConfigError
from tinkex.train.data import TrainingData, read_data
from tinkex.train.evaluations import Evaluations
from tinkex.train.examples import last_text
from tinkex.train.html_report import write_html
from tinkex.train.interrupts import CriticalSection, Interrupts
from tinkex.train.packing import Packing, pack
from tinkex.train.recipes import Metrics, PreparedStep, Recipe, RunContext, sample_greedy
from tinkex.train.report import TrainingReport
from tinkex.train.run_directory import RunDirectory
from tinkex.train.settings import Settings
from tinkex.train.starting import OpenModel, make_recipe, open_model

if TYPE_CHECKING:
    from tinkex.clients.sampling import SamplingClient
    from tinkex.clients.service import ServiceClient
    from tinkex.clients.training import TrainingClient
    from tinkex.train.examples import Messages
    from tinkex.types import AdamParams

__all__ = ["TrainingCallback", "learning_rate", "num_steps", "resume", "run", "step_batches"]

MAX_IN_FLIGHT = 2
"""Maximum number of concurrent steps: the next batch is submitted while the server computes the last one."""
NUM_SHOWN_PROMPTS = 3


class TrainingCallback:
    """Receives the progress of a run; override the methods you need and pass it to :func:`run` or :func:`resume`.

    >>> class Losses(TrainingCallback):
    ...     def stepped(self, step: int, metrics: Metrics) -> None:
    ...         print(step, metrics["loss"])
    >>> Losses().stepped(1, {"loss": 0.5})
    1 0.5
    >>> TrainingCallback().stepped(1, {"loss": 0.5})  # a method that is not overridden does nothing
    """

    def data_read(self, description: str) -> None:
        """Called when the data has been read and checked, before any request; ``description`` says what was read.

        >>> TrainingCallback().data_read("14 examples from chats.jsonl (messages)")
        """

    def created(self, directory: Path) -> None:
        """Called when the ``directory`` of the run exists: from now on the run can be resumed.

        >>> TrainingCallback().created(Path("run-1"))
        """

    def working(self, phase: str, done: int, total: int) -> None:
        """Called during phases that take time: ``done`` of ``total`` parts of this ``phase`` are done.

        >>> TrainingCallback().working("tokenizing", 3, 14)
        """

    def started(self, total_steps: int, first_step: int, headline: str) -> None:
        """Called when training starts after ``first_step`` of ``total_steps``; ``headline`` names the main metric.

        >>> TrainingCallback().started(12, 0, "loss")
        """

    def stepped(self, step: int, metrics: Metrics) -> None:
        """Called after ``step``, with its ``metrics``.

        >>> TrainingCallback().stepped(1, {"loss": 0.5})
        """

    def evaluated(self, step: int, metrics: Metrics) -> None:
        """Called after an evaluation on held-out examples, with its ``metrics``; ``step`` is the last step before it.

        >>> TrainingCallback().evaluated(4, {"eval_loss": 0.4})
        """

    def saved(self, step: int, path: str) -> None:
        """Called after a checkpoint was saved: ``path`` is its path, ``step`` the last step that it contains.

        >>> TrainingCallback().saved(4, "tinker://run-7/weights/0004")
        """

    def stopping(self, steps: int) -> None:
        """Called on Ctrl-C: ``steps`` steps are in flight, then the state is saved; a second Ctrl-C stops immediately.

        >>> TrainingCallback().stopping(2)
        """

    def finished(self) -> None:
        """Called after the last step, also after an error.

        >>> TrainingCallback().finished()
        """

    def closed(self) -> None:
        """Called last: after the report, or after an error.

        >>> TrainingCallback().closed()
        """


def run(
    service: ServiceClient,
    settings: Settings,
    watcher: TrainingCallback | None = None,
    *,
    data: TrainingData[Any] | None = None,
) -> TrainingReport:
    """Trains with ``settings`` on the server of ``service`` and returns the report, which is also written to the output directory.

    Data, reward, output directory and the lengths of examples are checked before the run exists on the server. ``data``
    is what :func:`read_data` has returned for the settings, if that was called before. ``watcher`` receives the progress. On
    ``KeyboardInterrupt`` the state is saved first; :func:`resume` continues from there.

    ::

        report = train.run(service, train.SftSettings(data=Path("chats.jsonl"), output=Path("run-1")))
    """
    watcher = watcher or TrainingCallback()
    RunDirectory.check_unused(settings.output)
    if data is None:
        data = read_data(settings)
        watcher.data_read(data.description)
    watcher = _with_trackers(settings, watcher)
    model = open_model(service, settings, watcher.working)
    recipe = make_recipe(settings, data, model.renderer)
    directory = RunDirectory.new(settings, model.name, service.config.base_url)
    watcher.created(directory.directory)
    watcher.working("creating the run", 0, 1)
    try:
        training = _training_client(service, settings, model.name, settings.start_from, with_optimizer=False)
    except BadRequestError:
        directory.discard()  # the server has rejected a setting: there is no run
        raise
    return _run(settings, data, model, training, recipe, directory, watcher, 0)


def resume(
    service: ServiceClient,
    directory: Path,
    watcher: TrainingCallback | None = None,
    *,
    recipe: str | None = None,
) -> TrainingReport:
    """Resumes the run in ``directory`` from its last checkpoint: with the same batches, optimizer state and learning rates.

    A run without a checkpoint restarts from the beginning; for a complete run, returns its report again. Raises
    ``ConfigError`` if ``recipe`` is not the run's recipe. ``service`` is a client of the run's server, and ``watcher`` receives
    the progress.

    ::

        report = train.resume(service, Path("run-1"))
    """
    watcher = watcher or TrainingCallback()
    run_directory, stored = RunDirectory.open(directory)
    settings = stored.settings
    if recipe is not None and settings.recipe != recipe:
        raise ConfigError(
            f"{directory} is a run of {settings.recipe}; resume it with: tinkex train {settings.recipe} --resume {directory}"
        )
    complete = TrainingReport.read(directory)
    if complete is not None:
        return complete
    data = read_data(settings)
    watcher.data_read(data.description)
    watcher = _with_trackers(settings, watcher)
    watcher.created(directory)
    saved = run_directory.checkpoints()
    step = int(saved[-1]["step"]) if saved else 0
    path = str(saved[-1]["path"]) if saved else settings.start_from
    model = open_model(service, settings, watcher.working, name=stored.base_model)
    method = make_recipe(settings, data, model.renderer)
    watcher.working("restoring the run", 0, 1)
    training = _training_client(service, settings, stored.base_model, path, with_optimizer=bool(saved))
    run_directory.rewind(step)
    return _run(settings, data, model, training, method, run_directory, watcher, step)


def _with_trackers(settings: Settings, watcher: TrainingCallback) -> TrainingCallback:
    from tinkex.train.tracking import with_trackers

    return with_trackers(settings, watcher)


def _run(
    settings: Settings,
    data: TrainingData[Any],
    model: OpenModel,
    training: TrainingClient,
    recipe: Recipe,
    directory: RunDirectory,
    watcher: TrainingCallback,
    first: int,
) -> TrainingReport:
    """Trains after step ``first``; metrics and rollouts are also written to the server, if it stores them."""
    from tinkex.train.tracking import CallbackGroup, ServerRecords

    records = ServerRecords(training)
    watcher = CallbackGroup(watcher, records)
    context = RunContext(training, model.sampler, model.renderer, watcher.working, records.rollouts)
    try:
        return _Run(settings, data, model.name, context, recipe, directory, watcher).run(first)
    finally:
        watcher.closed()


class _Run:
    """One run, from its first or a later step to the end."""

    def __init__(
        self,
        settings: Settings,
        data: TrainingData[Any],
        base_model: str,
        context: RunContext,
        recipe: Recipe,
        run_directory: RunDirectory,
        watcher: TrainingCallback,
    ) -> None:
        self._settings, self._context, self._recipe = settings, context, recipe
        self._num_held_out, self._base_model = len(data.held_out), base_model
        self._directory, self._watcher = run_directory, watcher
        self._num_examples = len(recipe.token_counts)
        self._per_epoch = steps_per_epoch(settings, self._num_examples)
        self._total = num_steps(settings, self._num_examples)
        self._pending: list[tuple[int, Sequence[Packing], Callable[[], Metrics]]] = []
        self._submitted = 0
        self._critical = CriticalSection()

    def run(self, first: int) -> TrainingReport:
        before = self._before(first)
        began = time.monotonic()
        if first == 0 or (self._evaluates_after(first) and first not in self._evaluations.steps):
            self._evaluate(first)  # also if an interrupt came between a step and its evaluation
        self._watcher.started(self._total, first, self._recipe.headline)
        self._submitted = first
        try:
            with Interrupts() as interrupts:
                self._critical = interrupts.critical
                for step in range(first + 1, self._total + 1):
                    if self._evaluations.should_stop(self._settings.early_stop):
                        break
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
        return self._report(before, first, time.monotonic() - began)

    def _submit(self, step: int) -> None:
        adam = self._adam(step)
        work = self._recipe.prepare(
            self._context, step_batches(self._settings, self._num_examples, step), step
        )
        packing = [pack([datum.model_input.to_ints() for datum in data]) for data in work.passes if data]
        with (
            self._critical
        ):  # else a checkpoint could contain passes without their step, or an uncounted step
            self._pending.append((step, packing, _submit_step(self._context.training, work, adam)))
            self._submitted = step

    def _evaluate_and_save(self, step: int) -> None:
        """Evaluates and saves a checkpoint after this step if due; the last ones follow in the report."""
        if step == self._total:
            return
        if self._evaluates_after(step):
            self._collect(0)
            self._evaluate(step)
        if self._settings.save_every is not None and step % self._settings.save_every == 0:
            self._collect(0)
            self._save(step, f"step-{step:06d}", self._settings.ttl_seconds)

    def _collect(self, leave: int) -> None:
        """Waits for steps until at most ``leave`` are in flight."""
        while len(self._pending) > leave:
            step, packing, metrics = self._pending[0]
            found = metrics()
            for name, value in found.items():
                if not math.isfinite(value):
                    raise ConfigError(
                        f"{name} is {value} after step {step}; start a new run with a lower --learning-rate (learning_rate=), "
                        "from an earlier checkpoint with --model-path (start_from=)"
                    )
            with self._critical:  # recorded exactly once
                self._directory.add_step(step, {**found, "packing": [one.as_json() for one in packing]})
                self._pending.pop(0)
            self._watcher.stepped(step, found)

    def _evaluates_after(self, step: int) -> bool:
        return step < self._total and step % (self._settings.eval_every or self._per_epoch) == 0

    @property
    def _evaluations(self) -> Evaluations:
        return Evaluations.of(self._recipe.headline, self._directory.steps())

    def _evaluate(self, step: int) -> None:
        found = self._recipe.evaluate(self._context)
        if found is None:
            return
        best = self._evaluations.best
        self._directory.add_step(step, {f"eval_{name}": value for name, value in found.items()})
        self._watcher.evaluated(step, found)
        if self._settings.keep_best and step and self._evaluations.best != best:
            path = self._context.training.save_state("best", overwrite=True).result().path
            self._directory.save_best({"step": step, "path": path})
            self._watcher.saved(step, path)

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
        return [*self._settings.sample_prompts] or _different(self._recipe.prompts, NUM_SHOWN_PROMPTS)

    def _sample(self, sampler: SamplingClient, phase: str) -> list[str]:
        context = self._context
        return sample_greedy(
            sampler,
            context.renderer,
            self._prompts(),
            self._settings.sample_tokens,
            phase=phase,
            progress=context.progress,
        )

    def _before(self, first: int) -> Sequence[str]:
        kept = self._directory.baseline()
        if first and kept is not None and len(kept["answers"]) == len(self._prompts()):
            return [str(answer) for answer in kept["answers"]]
        answers = self._sample(self._context.initial, "sampling before training")
        self._directory.save_baseline({"answers": answers})
        return answers

    def _report(self, before: Sequence[str], first: int, seconds: float) -> TrainingReport:
        last = self._submitted
        self._directory.rewind(last, evaluations=False)  # drop those of a process killed at this point
        self._evaluate(last)
        training = self._context.training
        path = self._save(last, "final")
        sampler_path = training.save_weights_for_sampler("final").result().path
        best = self._directory.best() if self._settings.keep_best else None
        if best is not None:
            path = str(best["path"])
            training.load_state(path).result()  # nothing trains after this
            sampler_path = training.save_weights_for_sampler("best").result().path
            self._directory.save_best({**best, "sampler_path": sampler_path})
        sampler = training.create_sampling_client(str(sampler_path))
        after = self._sample(sampler, "sampling after training")
        self._context.progress("writing the report", 0, 1)
        report = TrainingReport(
            recipe=self._settings.recipe,
            base_model=self._base_model,
            headline=self._recipe.headline,
            metrics=self._directory.steps(),
            samples=[
                {"prompt": last_text(prompt), "before": old, "after": new}
                for prompt, old, new in zip(self._prompts(), before, after, strict=True)
            ],
            checkpoint=path,
            sampler_checkpoint=str(sampler_path),
            num_examples=self._num_examples,
            num_held_out=self._num_held_out,
            best_step=int(best["step"]) if best is not None else None,
            stopped_early=last < self._total,
            resumed_after=first,
            seconds=seconds,
            output=self._directory.directory,
        )
        report.write()
        if self._settings.report:
            write_html(report, self._settings)
        return report


def _submit_step(training: TrainingClient, work: PreparedStep, adam: AdamParams) -> Callable[[], Metrics]:
    """Submits the passes of a step and the optimizer step; returns a function that waits and returns the metrics."""
    passed = [training.forward_backward(data, work.loss_fn) for data in work.passes if data]
    if not passed:
        return lambda: work.metrics
    stepped = training.optim_step(adam)

    def metrics() -> Metrics:
        loss = math.fsum(one.result().metrics["loss:sum"] for one in passed)
        stepped.result()
        return {"loss": loss, **work.metrics}

    return metrics


def step_batches(settings: Settings, num_examples: int, step: int) -> list[list[int]]:
    """Returns the indices of the examples of a step (from 1), batch by batch, shuffled in every epoch.

    A step has ``accumulate`` batches, together the examples of one batch that is as many times as large. The last step of an
    epoch may have fewer, and smaller ones.

    >>> from tinkex.train.settings import SftSettings
    >>> settings = SftSettings(data=Path("a.jsonl"), output=Path("run"), batch_size=2, accumulate=2)
    >>> [step_batches(settings, 7, step) for step in (1, 2)]
    [[[2, 3], [1, 0]], [[6, 5], [4]]]
    """
    size = settings.batch_size
    epoch, index = divmod(step - 1, steps_per_epoch(settings, num_examples))
    order = _epoch_order(num_examples, settings.seed, epoch)
    first = index * size * settings.accumulate
    stop = min(first + size * settings.accumulate, num_examples)
    return [list(order[place : min(place + size, stop)]) for place in range(first, stop, size)]


@lru_cache(maxsize=2)
def _epoch_order(num_examples: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(num_examples))
    random.Random(f"{seed}:{epoch}").shuffle(order)  # noqa: S311 -- repeatable on purpose
    return tuple(order)


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


def num_steps(settings: Settings, num_examples: int) -> int:
    """Returns the number of steps of a run: ``steps``, or as many as the epochs take."""
    return settings.steps or steps_per_epoch(settings, num_examples) * settings.epochs


def steps_per_epoch(settings: Settings, num_examples: int) -> int:
    """Returns the number of optimizer steps of one pass over the data."""
    return math.ceil(num_examples / (settings.batch_size * settings.accumulate))


def _training_client(
    service: ServiceClient, settings: Settings, base_model: str, path: str | None, *, with_optimizer: bool
) -> TrainingClient:
    if path is None:
        return service.create_lora_training_client(base_model, rank=settings.rank, seed=settings.seed)
    if with_optimizer:
        return service.create_training_client_from_state_with_optimizer(path)
    return service.create_training_client_from_state(path)


def _different(prompts: Sequence[Messages | str], number: int) -> list[Messages | str]:
    """Returns the first prompts that are not shown as the same text."""
    found: dict[str, Messages | str] = {}
    for prompt in prompts:
        if len(found) == number:
            break
        found.setdefault(last_text(prompt), prompt)
    return list(found.values())


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Loads a name of 0.1, with a ``DeprecationWarning``."""
        if name.startswith("__"):  # the import system looks up __path__
            raise AttributeError(name)
        from tinkex._moved import load_renamed

        return load_renamed(__name__, name)
