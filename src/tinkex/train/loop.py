"""The loop all recipes share: batches, learning rate, evaluation, checkpoints, and going on after a stop."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.errors import ConfigError
from tinkex.train.interrupts import Held, Interrupts
from tinkex.train.notebook import Notebook
from tinkex.train.recipes import Metrics, Place, Recipe, Work, greedy
from tinkex.train.rendering import Renderer
from tinkex.train.report import Report
from tinkex.train.settings import DpoSettings, GrpoSettings, Settings, SftSettings

if TYPE_CHECKING:
    from tinkex.clients.service import ServiceClient
    from tinkex.clients.training import TrainingClient
    from tinkex.train.examples import Messages
    from tinkex.types import AdamParams

__all__ = ["Watcher", "batch_of", "learning_rate", "resume", "run"]

IN_FLIGHT = 2
"""Steps on their way at once: the next batch is sent while the last one is computed."""
SHOWN_PROMPTS = 3


class Watcher:
    """Is told what a run does; override what you want to see."""

    def started(self, total_steps: int, first_step: int, headline: str) -> None:
        """Training begins after ``first_step`` of ``total_steps``."""

    def stepped(self, step: int, metrics: Metrics) -> None:
        """A step is done."""

    def evaluated(self, step: int, metrics: Metrics) -> None:
        """The model was tried on examples it is not trained on."""

    def saved(self, step: int, path: str) -> None:
        """A checkpoint was written."""

    def stopping(self, steps: int) -> None:
        """Ctrl-C came: so many steps are still on their way, then the state is saved; another one ends at once."""

    def finished(self) -> None:
        """No more steps come, whatever the reason."""


def run(service: ServiceClient, settings: Settings, watcher: Watcher | None = None) -> Report:
    """Trains as the settings say, and returns the report, which is also written into the output directory.

    On ``KeyboardInterrupt`` the state is saved first; :func:`resume` goes on from there.
    """
    base_model = _base_model(service, settings)
    place = _place(service, settings, base_model, settings.start_from, with_optimizer=False)
    recipe = _recipe(settings, place)
    book = Notebook.new(settings, base_model)
    return _Run(settings, place, recipe, book, watcher or Watcher()).go(0)


def resume(
    service: ServiceClient, directory: Path, watcher: Watcher | None = None, *, recipe: str | None = None
) -> Report:
    """Goes on with a run from its last checkpoint: the same batches, optimizer state and learning rates.

    A run that was stopped before its first checkpoint begins anew; one that is complete gives its report again.
    ``recipe`` is refused if it is another one's.
    """
    book, settings, base_model = Notebook.open(directory)
    if recipe is not None and settings.recipe != recipe:
        raise ConfigError(
            f"{directory} is a run of {settings.recipe}; go on with: tinkex train {settings.recipe} --resume {directory}"
        )
    complete = Report.read(directory)
    if complete is not None:
        return complete
    saved = book.checkpoints()
    step = int(saved[-1]["step"]) if saved else 0
    path = str(saved[-1]["path"]) if saved else settings.start_from
    place = _place(service, settings, base_model, path, with_optimizer=bool(saved))
    book.rewind(step)
    return _Run(settings, place, _recipe(settings, place), book, watcher or Watcher()).go(step)


class _Run:
    """One run, from its first or a later step to the end."""

    def __init__(
        self, settings: Settings, place: Place, recipe: Recipe, book: Notebook, watcher: Watcher
    ) -> None:
        self._settings, self._place, self._recipe = settings, place, recipe
        self._book, self._watcher = book, watcher
        self._per_epoch = math.ceil(recipe.num_examples / settings.batch_size)
        self._total = settings.steps or self._per_epoch * settings.epochs
        self._pending: list[tuple[int, Callable[[], Metrics]]] = []
        self._submitted = 0
        self._held = Held()

    def go(self, first: int) -> Report:
        before = self._before(first)
        began = time.monotonic()
        if first == 0:
            self._evaluate(0)
        self._watcher.started(self._total, first, self._recipe.headline)
        self._submitted = first
        try:
            with Interrupts() as interrupts:
                self._held = interrupts.held
                for step in range(first + 1, self._total + 1):
                    self._submit(step)
                    self._collect(IN_FLIGHT - 1)
                    self._between(step)
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
        batch = batch_of(self._recipe.num_examples, self._settings.batch_size, step, self._settings.seed)
        work = self._recipe.prepare(batch, step)
        with self._held:  # a pass without its step, or a step that is not counted, would be in what is saved
            self._pending.append((step, _sent(self._place.training, work, adam)))
            self._submitted = step

    def _between(self, step: int) -> None:
        """What happens after some steps: evaluation and checkpoints; the last ones come at the end."""
        if step == self._total:
            return
        if step % (self._settings.eval_every or self._per_epoch) == 0:
            self._collect(0)
            self._evaluate(step)
        if self._settings.save_every is not None and step % self._settings.save_every == 0:
            self._collect(0)
            self._save(step, f"step-{step:06d}", self._settings.ttl_seconds)

    def _collect(self, leave: int) -> None:
        """Waits for steps until at most ``leave`` are on their way."""
        while len(self._pending) > leave:
            step, metrics = self._pending[0]
            found = metrics()
            for name, value in found.items():
                if not math.isfinite(value):
                    raise ConfigError(
                        f"{name} is {value} after step {step}; go on from an earlier checkpoint with a lower learning rate"
                    )
            with self._held:  # noted once
                self._book.add_step(step, dict(found))
                self._pending.pop(0)
            self._watcher.stepped(step, found)

    def _evaluate(self, step: int) -> None:
        found = self._recipe.evaluate()
        if found is not None:
            self._book.add_step(step, {f"eval_{name}": value for name, value in found.items()})
            self._watcher.evaluated(step, found)

    def _save(self, step: int, name: str, ttl_seconds: int | None = None) -> str:
        path = self._place.training.save_state(name, ttl_seconds, overwrite=True).result().path
        self._book.add_checkpoint(step, path)
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
        return [*self._settings.sample_prompts] or list(self._recipe.prompts[:SHOWN_PROMPTS])

    def _before(self, first: int) -> Sequence[str]:
        kept = self._book.before()
        if first and kept is not None:
            return [str(answer) for answer in kept["answers"]]
        place, settings = self._place, self._settings
        if settings.start_from is not None:
            sampler = place.service.create_sampling_client(model_path=settings.start_from)
        else:
            sampler = place.service.create_sampling_client(base_model=place.base_model)
        answers = greedy(sampler, place.renderer, self._prompts(), settings.sample_tokens)
        self._book.keep_before({"answers": answers})
        return answers

    def _report(self, before: Sequence[str], seconds: float) -> Report:
        self._book.rewind(self._total, evaluations=False)  # of a process that was killed while it reported
        self._evaluate(self._total)
        sampler = self._place.training.save_weights_and_get_sampling_client()
        prompts = self._prompts()
        after = greedy(sampler, self._place.renderer, prompts, self._settings.sample_tokens)
        path = self._save(self._total, "final")
        sampler_path = self._place.training.save_weights_for_sampler("final").result().path
        report = Report(
            recipe=self._settings.recipe,
            base_model=self._place.base_model,
            headline=self._recipe.headline,
            metrics=self._book.steps(),
            samples=[
                {"prompt": _shown(prompt), "before": old, "after": new}
                for prompt, old, new in zip(prompts, before, after, strict=True)
            ],
            checkpoint=path,
            sampler_checkpoint=str(sampler_path),
            num_examples=self._recipe.num_examples,
            seconds=seconds,
            output=self._book.directory,
        )
        report.write()
        return report


def _sent(training: TrainingClient, work: Work, adam: AdamParams) -> Callable[[], Metrics]:
    """Sends a step on its way; what it returns waits for it and gives its metrics."""
    if not work.data:
        return lambda: work.metrics
    passed = training.forward_backward(work.data, work.loss_fn)
    stepped = training.optim_step(adam)

    def metrics() -> Metrics:
        loss = passed.result().metrics["loss:sum"]
        stepped.result()
        return {"loss": loss, **work.metrics}

    return metrics


def batch_of(num_examples: int, batch_size: int, step: int, seed: int) -> list[int]:
    """The places of the examples of a step (from 1), shuffled anew in every epoch; the last batch may be small.

    >>> [batch_of(3, 2, step, seed=0) for step in (1, 2)]
    [[1, 0], [2]]
    """
    per_epoch = math.ceil(num_examples / batch_size)
    epoch, place = divmod(step - 1, per_epoch)
    order = list(range(num_examples))
    random.Random(f"{seed}:{epoch}").shuffle(order)  # noqa: S311 -- repeatable on purpose
    return order[place * batch_size : (place + 1) * batch_size]


def learning_rate(peak: float, step: int, total: int, schedule: str, warmup_steps: int) -> float:
    """The rate of a step (from 1): up in a line while warming up, then as the schedule says.

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
        raise ConfigError("which model? Give it with --model (model=…)")
    return settings.model


def _place(
    service: ServiceClient, settings: Settings, base_model: str, path: str | None, *, with_optimizer: bool
) -> Place:
    training: TrainingClient
    if path is None:
        training = service.create_lora_training_client(base_model, rank=settings.rank, seed=settings.seed)
    elif with_optimizer:
        training = service.create_training_client_from_state_with_optimizer(path)
    else:
        training = service.create_training_client_from_state(path)
    return Place(service, training, Renderer(training.get_tokenizer(), settings.chat), base_model)


def _recipe(settings: Settings, place: Place) -> Recipe:
    from tinkex.train.dpo import Dpo
    from tinkex.train.grpo import Grpo
    from tinkex.train.sft import Sft

    if isinstance(settings, SftSettings):
        return Sft(settings, place)
    if isinstance(settings, DpoSettings):
        return Dpo(settings, place)
    if isinstance(settings, GrpoSettings):
        return Grpo(settings, place)
    raise ConfigError(
        f"no recipe takes {type(settings).__name__}; there are SftSettings, DpoSettings, GrpoSettings"
    )


def _shown(prompt: Messages | str) -> str:
    if isinstance(prompt, str):
        return prompt
    last: Mapping[str, Any] = prompt[-1]
    return str(last["content"])
