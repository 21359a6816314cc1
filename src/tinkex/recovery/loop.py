"""A training loop that survives a crash of its server, the loss of its run, and a crash of its own process.

Every batch is applied exactly once to the resulting weights. A run with an operation of unknown outcome is abandoned:
the loop restarts from the last checkpoint, which stores its position in the data, and repeats the batches since then.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

from tinkex._runtime import background
from tinkex._transport.retry import GiveUp, Retry, backoff, decide
from tinkex.errors import APIConnectionError, APIError, RecoveryError, TinkexError
from tinkex.observability.events import (
    CallbackFailed,
    RecoveryFailed,
    RecoveryStarted,
    RunRecovered,
    RunUnhealthy,
)
from tinkex.recovery.batches import Batches, EndOfData
from tinkex.recovery.diagnosis import is_interruption, outcome_of, says_run_is_gone
from tinkex.recovery.policy import Condition, RecoveryPolicy, RecoveryResult
from tinkex.recovery.progress import SavedCheckpoint, TrainingProgress
from tinkex.recovery.restoring import call_user_function, paths_for, restore_first
from tinkex.recovery.steps import TrainingStep
from tinkex.recovery.tracking import TrackedTraining

if TYPE_CHECKING:
    from tinkex.clients.service import ServiceClient
    from tinkex.clients.training import TrainingClient
    from tinkex.observability.events import Sink
    from tinkex.observability.terminal import TrainingLine

__all__ = ["ResilientTraining"]

B = TypeVar("B")

BEGINNING: Final = "the beginning"


class ResilientTraining(Generic[B]):
    """A training loop that restarts from its checkpoints; created by :func:`resilient_training`."""

    def __init__(
        self,
        service: ServiceClient,
        batches: Batches[B],
        progress: TrainingProgress,
        create: Callable[[Mapping[str, str]], Any],
        *,
        every_steps: int | None,
        every_s: float | None,
        keep: int | None,
        resume: Literal["auto", "never", "must"],
        policy: RecoveryPolicy,
        user_metadata: Mapping[str, str],
        show_progress: bool,
        sink: Sink,
    ) -> None:
        self.position = 0
        """The number of batches applied to the weights."""
        self.checkpoint: str | None = None
        """The last checkpoint, from which the loop would restart."""
        self.resumed_at: int | None = None
        """The position at which an earlier process's training was resumed; None for a new training."""
        self.recoveries = 0
        """The number of restarts."""
        self._service, self._batches, self._progress, self._create = service, batches, progress, create
        self._every_steps, self._every_s, self._keep = every_steps, every_s, keep
        self._resume, self._policy, self._metadata, self._sink = resume, policy, user_metadata, sink
        self._show_progress = show_progress
        self._training: TrackedTraining | None = None
        self._saved_at = 0
        self._saved_when = time.monotonic()
        self._rotation: list[str] = []
        self._numbers: dict[str, float] = {}
        self._failed_at = -1
        self._attempt = 0
        self._line: TrainingLine | None = None
        self._lines = ExitStack()

    @property
    def training(self) -> TrainingClient:
        """The current run; a restart replaces it."""
        if self._training is None:
            raise RuntimeError("the loop has not started; iterate over it first")
        return self._training

    def __iter__(self) -> Iterator[TrainingStep[B]]:
        run = background().run
        with self._lines:
            run(self._open())
            while True:
                step = self._next()
                if step is not None:
                    yield step
                    if not self._finish_trivial(step):
                        run(self._finish_step(step))
                        self._stop_if_asked(step)
                        if self._is_over(step):
                            return
                elif run(self._is_finished()):
                    return

    async def __aiter__(self) -> AsyncIterator[TrainingStep[B]]:
        with self._lines:
            await self._open()
            while True:
                step = self._next()
                if step is not None:
                    yield step
                    if not self._finish_trivial(step):
                        await self._finish_step(step)
                        if self._is_over(step):
                            return
                elif await self._is_finished():
                    return

    def run(self, train_step: Callable[[TrainingStep[B]], Mapping[str, float] | None]) -> None:
        """Runs the whole loop with a function for the step; the metrics it returns are reported."""
        for step in self:
            with step:
                step.report(**(train_step(step) or {}))

    # ---- the loop ----

    def _next(self) -> TrainingStep[B] | None:
        batch = self._batches.at(self.position)
        if isinstance(batch, EndOfData):
            return None
        assert self._training is not None
        self._training.step = self.position
        return TrainingStep(self.position, batch, self._training, self._batches.total)

    async def _finish_step(self, step: TrainingStep[B]) -> None:
        """Completes a step: advances the position and saves a checkpoint if due, or recovers."""
        if not step.entered:
            raise RuntimeError(
                "a step of a resilient training is a context manager: put its body inside `with step:`"
            )
        if step.failure is not None:
            await self._recover(step.failure)
            return
        self._count(step)
        await self._or_recover(
            self._check_operations(save=step.wants_checkpoint or self._is_due(self.position))
        )

    def _finish_trivial(self, step: TrainingStep[B]) -> bool:
        """Completes a step that needs neither a checkpoint nor recovery, the common case; returns whether it did."""
        assert self._training is not None
        busy = not step.entered or step.failure is not None or step.wants_checkpoint
        if busy or self._is_due(self.position + 1) or self._training.has_failures():
            return False
        self._count(step)
        return True

    def _count(self, step: TrainingStep[B]) -> None:
        self.position += 1
        self._numbers = step.metrics
        self._show(step)

    def _is_over(self, step: TrainingStep[B]) -> bool:
        """Returns whether the program made this step the last one, and its checkpoint is saved."""
        return step.is_last and self._saved_at == step.index + 1

    def _stop_if_asked(self, step: TrainingStep[B]) -> None:
        if step.stop_requested:
            raise KeyboardInterrupt(f"stopped at step {self.position}; resume from {self.checkpoint}")

    async def _is_finished(self) -> bool:
        """Saves the final checkpoint; returns False if the run turns out to be lost and steps must be repeated."""
        end = self.position
        if end > self._saved_at:
            await self._or_recover(self._check_operations(save=True))
        return self.position == end

    def _is_due(self, position: int) -> bool:
        steps, seconds = self._every_steps, self._every_s
        return (steps is not None and position - self._saved_at >= steps) or (
            seconds is not None and time.monotonic() - self._saved_when >= seconds
        )

    # ---- checkpoints ----

    async def _or_recover(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except TinkexError as error:
            if not (is_interruption(error) or says_run_is_gone(error)):
                raise
            await self._recover(error)

    async def _check_operations(self, *, save: bool) -> None:
        """Raises failures of operations whose results the program did not await; before saving, waits for all of them."""
        assert self._training is not None
        if save:
            await self._training.wait_all()
            await self._save()
        else:
            self._training.check()

    async def _save(self) -> None:
        if self._saved_at == self.position:
            return
        saving = self.training.save_state(
            f"{self._progress.name}-{self.position:08d}",
            user_metadata=self._progress.checkpoint_metadata(self.position, self._numbers),
        )
        self._set_position(self.position, (await saving).path)
        await self._rotate()

    def _set_position(self, position: int, path: str | None) -> None:
        self.position = self._saved_at = position
        self.checkpoint = path
        self._saved_when = time.monotonic()
        self._batches.forget_before(position)
        if path is not None:
            self._rotation.append(path)

    async def _rotate(self) -> None:
        """Deletes old checkpoints; if the server is unreachable, tries again after the next save."""
        rest = self._service.create_rest_client()
        while self._keep is not None and len(self._rotation) > self._keep:
            try:
                await rest.delete_checkpoint_from_tinker_path_async(self._rotation[0])
            except APIError as error:
                if is_interruption(error):
                    return
                self._sink.emit(CallbackFailed("keep", f"{type(error).__name__}: {error}"))
            del self._rotation[0]

    # ---- starting ----

    async def _open(self) -> None:
        if self._training is not None:
            raise RuntimeError("a resilient training can be iterated once; create another to repeat the data")
        path = await self._with_retries(self._begin, self._progress.name, "it was started")
        if path is not None:
            self.resumed_at = self.position
            self._check_data()
        self._open_line()

    def _check_data(self) -> None:
        if not self._batches.reaches(self.position):
            raise RecoveryError(
                f"the training {self._progress.name!r} is at batch {self.position} ({self.checkpoint}), but the data has "
                "fewer; pass the same data in the same order, or train from the beginning with resume='never'",
                self._progress.name,
            )

    async def _begin(self, _attempt: int) -> str | None:
        found = await self._progress.find(self._service.create_rest_client())
        if not found or self._resume == "never":
            if self._resume == "must":
                raise RecoveryError(
                    f"there is no training named {self._progress.name!r} to resume on this server",
                    self._progress.name,
                )
            self._progress.begin()
        return await self._restart(_ignore)

    async def _restart(self, on_attempt: Callable[[str], None]) -> str | None:
        """Restores a run from a checkpoint and returns its path; creates a new run and returns None if there is none."""
        await self._service.renew_session_async()  # if the run is lost, its session may be lost too
        rest = self._service.create_rest_client()
        saved: Mapping[str, SavedCheckpoint] = {one.path: one for one in await self._progress.saved(rest)}
        marked = self._progress.run_metadata(self._metadata)
        path = None
        if saved:
            training, path = await restore_first(
                self._service,
                self._progress.name,
                await self._paths(saved),
                optimizer=self._policy.restore_optimizer,
                user_metadata=marked,
                on_attempt=on_attempt,
            )
        elif self.checkpoint is not None:
            raise RecoveryError(
                f"the server no longer has a checkpoint of the training {self._progress.name!r}; the last one was "
                f"{self.checkpoint}. To train from the beginning, use resume='never'",
                self._progress.name,
            )
        else:
            on_attempt(BEGINNING)
            training = await self._create(marked)
        self._progress.add_run(training.model_id)
        self._training = TrackedTraining(training)
        self._rotation = [one.path for one in reversed(list(saved.values())) if one.path != path]
        self._set_position(saved[path].position if path is not None else 0, path)
        return path

    async def _paths(self, saved: Mapping[str, SavedCheckpoint]) -> list[str]:
        if self._policy.checkpoint == "latest":
            return list(saved)  # by position, across runs
        paths = await paths_for(self._policy, self._progress.name, [one.checkpoint for one in saved.values()])
        for path in paths:
            if path not in saved:
                raise RecoveryError(
                    f"{path} is not a checkpoint of the training {self._progress.name!r}: its position in the data is unknown",
                    self._progress.name,
                )
        return paths

    # ---- recovery ----

    async def _recover(self, error: Exception) -> None:
        """Restarts from the last checkpoint in a new run; raises if the same position keeps failing."""
        lost = self.training
        condition: Condition = "unreachable" if isinstance(error, APIConnectionError) else "lost"
        self._sink.emit(RunUnhealthy(lost.model_id, condition, f"{type(error).__name__}: {error}"))
        if self.position > self._failed_at:
            self._failed_at, self._attempt = self.position, 0
        elif self._attempt >= self._policy.max_attempts:
            failure = RecoveryError(
                f"step {self.position} of {self._progress.name!r} failed {self._attempt + 1} times, each time in a new "
                f"run: {error}",
                lost.model_id,
            )
            await self._call_back(self._policy.on_failure, "on_failure", lost.model_id, failure)
            raise failure from error
        else:
            await asyncio.sleep(backoff(self._attempt - 1, self._policy.retries, random.random))
        self._attempt += 1
        path = await self._with_retries(
            lambda attempt: self._restart(partial(self._emit_started, lost.model_id, attempt)),
            lost.model_id,
            str(error),
        )
        self.recoveries += 1
        self._sink.emit(
            RunRecovered(lost.model_id, self.training.model_id, path or BEGINNING, self._attempt - 1)
        )
        lost.unload()  # if it still exists, this frees its memory
        result = RecoveryResult(lost.model_id, self.training, path or BEGINNING, self._attempt, condition)
        await self._call_back(self._policy.on_recovery, "on_recovery", result)
        self._open_line()

    async def _with_retries(
        self, restart: Callable[[int], Coroutine[Any, Any, str | None]], run_id: str, after: str
    ) -> str | None:
        """Calls ``restart`` with the number of the attempt, as often as the policy allows."""
        began, attempt = time.monotonic(), 0
        while True:
            try:
                return await restart(attempt)
            except (TinkexError, TimeoutError, OSError) as again:
                outcome = outcome_of(again)
                step = (
                    outcome
                    if isinstance(outcome, GiveUp)
                    else decide(
                        outcome, attempt, time.monotonic() - began, self._policy.retries, random.random
                    )
                )
                after_s = step.after if isinstance(step, Retry) else None
                reason = f"{type(again).__name__}: {again}"
                self._sink.emit(RecoveryFailed(run_id, attempt, reason, after_s))
                if after_s is None:
                    if isinstance(outcome, GiveUp) and not isinstance(again, RecoveryError):
                        raise  # a configuration error, whose message needs no context
                    failure = (
                        again
                        if isinstance(again, RecoveryError)
                        else RecoveryError(
                            f"the training {self._progress.name!r} could not be restarted after {after}: {again}",
                            run_id,
                        )
                    )
                    await self._call_back(self._policy.on_failure, "on_failure", run_id, failure)
                    raise failure from again
                await asyncio.sleep(after_s)
                attempt += 1

    def _emit_started(self, run_id: str, attempt: int, path: str) -> None:
        self._sink.emit(RecoveryStarted(run_id, attempt, path))

    async def _call_back(self, callback: Callable[..., Any] | None, name: str, *arguments: object) -> None:
        if callback is None:
            return
        try:
            await call_user_function(callback, *arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - emitted as an event; the recovery continues
            self._sink.emit(CallbackFailed(name, f"{type(error).__name__}: {error}"))

    # ---- the progress line ----

    def _open_line(self) -> None:
        total = self._batches.total
        if not self._show_progress or total is None or total <= self.position:
            return
        from tinkex.observability.terminal import training_line

        self._lines.close()
        self._line = self._lines.enter_context(training_line(total - self.position))

    def _show(self, step: TrainingStep[B]) -> None:
        if self._line is None or "loss" not in step.metrics:
            return
        datums = step.batch if isinstance(step.batch, list) else []
        counted = sum(getattr(getattr(one, "model_input", None), "length", 0) for one in datums)
        self._line.update(loss=step.metrics["loss"], num_tokens=int(step.metrics.get("num_tokens", counted)))


def _ignore(path: str) -> None:
    """Emits nothing: starting a training is not a recovery."""
