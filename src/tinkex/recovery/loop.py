"""A training loop that goes on: after its server was killed, after its run was lost, after its own end.

Every batch is applied once to what becomes of the weights. A run whose operation may or may not have been
carried out is not trained on: the loop restarts from the last checkpoint, whose position in the data is part of
it, and repeats the batches since on weights that have not seen them.
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
from tinkex.recovery.batches import Batches, NoMore
from tinkex.recovery.diagnosis import is_interruption, outcome_of, says_run_is_gone
from tinkex.recovery.policy import Condition, Recovered, RecoveryPolicy
from tinkex.recovery.progress import Progress, Saved
from tinkex.recovery.restoring import called, paths_for, restore_first
from tinkex.recovery.steps import Step
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
    """A training loop that restarts from its checkpoints; made by :func:`resilient_training`."""

    def __init__(
        self,
        service: ServiceClient,
        batches: Batches[B],
        progress: Progress,
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
        """How many batches the weights have seen."""
        self.checkpoint: str | None = None
        """The last checkpoint, from which the loop would restart."""
        self.resumed_at: int | None = None
        """Where an earlier program's training was taken up; None for one that began here."""
        self.recoveries = 0
        """How often the loop had to restart."""
        self._service, self._batches, self._progress, self._create = service, batches, progress, create
        self._every_steps, self._every_s, self._keep = every_steps, every_s, keep
        self._resume, self._policy, self._metadata, self._sink = resume, policy, user_metadata, sink
        self._show_progress = show_progress
        self._training: TrackedTraining | None = None
        self._saved_at = 0
        self._saved_when = time.monotonic()
        self._rotation: list[str] = []
        self._numbers: dict[str, float] = {}
        self._troubled_at = -1
        self._attempt = 0
        self._line: TrainingLine | None = None
        self._lines = ExitStack()

    @property
    def training(self) -> TrainingClient:
        """The run that is being trained; another one after a restart."""
        if self._training is None:
            raise RuntimeError("the loop has not begun; iterate over it first")
        return self._training

    def __iter__(self) -> Iterator[Step[B]]:
        run = background().run
        with self._lines:
            run(self._open())
            while True:
                step = self._next()
                if step is not None:
                    yield step
                    if not self._went_well(step):
                        run(self._settle(step))
                        self._stop_if_asked(step)
                        if self._is_over(step):
                            return
                elif run(self._is_finished()):
                    return

    async def __aiter__(self) -> AsyncIterator[Step[B]]:
        with self._lines:
            await self._open()
            while True:
                step = self._next()
                if step is not None:
                    yield step
                    if not self._went_well(step):
                        await self._settle(step)
                        if self._is_over(step):
                            return
                elif await self._is_finished():
                    return

    def run(self, train_step: Callable[[Step[B]], Mapping[str, float] | None]) -> None:
        """The whole loop with a function for the step; numbers that it returns are reported."""
        for step in self:
            with step:
                step.report(**(train_step(step) or {}))

    # ---- the loop ----

    def _next(self) -> Step[B] | None:
        batch = self._batches.at(self.position)
        if isinstance(batch, NoMore):
            return None
        assert self._training is not None
        self._training.step = self.position
        return Step(self.position, batch, self._training, self._batches.total)

    async def _settle(self, step: Step[B]) -> None:
        """What follows a step: the next position and a checkpoint, or the way back to the last one."""
        if not step.entered:
            raise RuntimeError(
                "a step of a resilient training is used as a block: `with step:` around its body"
            )
        if step.trouble is not None:
            await self._recover(step.trouble)
            return
        self._count(step)
        await self._or_recover(self._look_back(save=step.wants_checkpoint or self._is_due(self.position)))

    def _went_well(self, step: Step[B]) -> bool:
        """Counts a step after which there is nothing to do, as is most often the case; whether it was one."""
        assert self._training is not None
        busy = not step.entered or step.trouble is not None or step.wants_checkpoint
        if busy or self._is_due(self.position + 1) or self._training.has_failures():
            return False
        self._count(step)
        return True

    def _count(self, step: Step[B]) -> None:
        self.position += 1
        self._numbers = step.metrics
        self._show(step)

    def _is_over(self, step: Step[B]) -> bool:
        """Whether the program said that this step is the last, and its checkpoint stands."""
        return step.is_last and self._saved_at == step.index + 1

    def _stop_if_asked(self, step: Step[B]) -> None:
        if step.asked_to_stop:
            raise KeyboardInterrupt(
                f"stopped at step {self.position}; {self.checkpoint} is there to go on from"
            )

    async def _is_finished(self) -> bool:
        """Saves the end; where that shows that the run is lost, there are steps to repeat, and it is not the end."""
        end = self.position
        if end > self._saved_at:
            await self._or_recover(self._look_back(save=True))
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

    async def _look_back(self, *, save: bool) -> None:
        """Raises what went wrong in steps that did not wait for it; a checkpoint waits until nothing can."""
        assert self._training is not None
        if save:
            await self._training.settle()
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
        self._stands_at(self.position, (await saving).path)
        await self._rotate()

    def _stands_at(self, position: int, path: str | None) -> None:
        self.position = self._saved_at = position
        self.checkpoint = path
        self._saved_when = time.monotonic()
        self._batches.forget_before(position)
        if path is not None:
            self._rotation.append(path)

    async def _rotate(self) -> None:
        """Deletes what is too old; what cannot be deleted now is tried again after the next save."""
        rest = self._service.create_rest_client()
        while self._keep is not None and len(self._rotation) > self._keep:
            try:
                await rest.delete_checkpoint_from_tinker_path_async(self._rotation[0])
            except APIError as error:
                if is_interruption(error):
                    return
                self._sink.emit(CallbackFailed("keep", f"{type(error).__name__}: {error}"))
            del self._rotation[0]

    # ---- beginnings ----

    async def _open(self) -> None:
        if self._training is not None:
            raise RuntimeError("a resilient training is one loop; make another to go over the data again")
        path = await self._patiently(self._begin, self._progress.name, "it was started")
        if path is not None:
            self.resumed_at = self.position
            self._check_data()
        self._open_line()

    def _check_data(self) -> None:
        if not self._batches.reaches(self.position):
            raise RecoveryError(
                f"the training {self._progress.name!r} stands after batch {self.position} ({self.checkpoint}), and the data "
                "has fewer; give it the same data in the same order, or train from the beginning with resume='never'",
                self._progress.name,
            )

    async def _begin(self, _attempt: int) -> str | None:
        found = await self._progress.find(self._service.create_rest_client())
        if not found or self._resume == "never":
            if self._resume == "must":
                raise RecoveryError(
                    f"there is no training called {self._progress.name!r} to resume on this server",
                    self._progress.name,
                )
            self._progress.begin()
        return await self._restart(_unheard)

    async def _restart(self, trying: Callable[[str], None]) -> str | None:
        """A run that stands at a checkpoint, or a new one where there is none; which checkpoint it was."""
        await self._service.renew_session_async()  # where the run is lost, its session may be as well
        rest = self._service.create_rest_client()
        saved: Mapping[str, Saved] = {one.path: one for one in await self._progress.saved(rest)}
        marked = self._progress.run_metadata(self._metadata)
        path = None
        if saved:
            training, path = await restore_first(
                self._service,
                self._progress.name,
                await self._paths(saved),
                optimizer=self._policy.restore_optimizer,
                user_metadata=marked,
                trying=trying,
            )
        elif self.checkpoint is not None:
            raise RecoveryError(
                f"the server has no checkpoint of the training {self._progress.name!r} any more; the last one was "
                f"{self.checkpoint}. To train it from the beginning, start it with resume='never'",
                self._progress.name,
            )
        else:
            trying(BEGINNING)
            training = await self._create(marked)
        self._progress.add_run(training.model_id)
        self._training = TrackedTraining(training)
        self._rotation = [one.path for one in reversed(list(saved.values())) if one.path != path]
        self._stands_at(saved[path].position if path is not None else 0, path)
        return path

    async def _paths(self, saved: Mapping[str, Saved]) -> list[str]:
        if self._policy.checkpoint == "latest":
            return list(saved)  # by position: a step is a step, whichever run took it
        paths = await paths_for(self._policy, self._progress.name, [one.checkpoint for one in saved.values()])
        for path in paths:
            if path not in saved:
                raise RecoveryError(
                    f"{path} is no checkpoint of the training {self._progress.name!r}: its place in the data is unknown",
                    self._progress.name,
                )
        return paths

    # ---- trouble ----

    async def _recover(self, error: Exception) -> None:
        """Back to the last checkpoint in a new run; a place where it keeps failing is given up."""
        lost = self.training
        condition: Condition = "unreachable" if isinstance(error, APIConnectionError) else "lost"
        self._sink.emit(RunUnhealthy(lost.model_id, condition, f"{type(error).__name__}: {error}"))
        if self.position > self._troubled_at:
            self._troubled_at, self._attempt = self.position, 0
        elif self._attempt >= self._policy.max_attempts:
            failure = RecoveryError(
                f"step {self.position} of {self._progress.name!r} failed {self._attempt + 1} times, each time in a new "
                f"run: {error}",
                lost.model_id,
            )
            await self._tell(self._policy.on_failure, "on_failure", lost.model_id, failure)
            raise failure from error
        else:
            await asyncio.sleep(backoff(self._attempt - 1, self._policy.retries, random.random))
        self._attempt += 1
        path = await self._patiently(
            lambda attempt: self._restart(partial(self._trying, lost.model_id, attempt)),
            lost.model_id,
            str(error),
        )
        self.recoveries += 1
        self._sink.emit(
            RunRecovered(lost.model_id, self.training.model_id, path or BEGINNING, self._attempt - 1)
        )
        lost.unload()  # should it still be there, it is in nobody's way
        news = Recovered(lost.model_id, self.training, path or BEGINNING, self._attempt, condition)
        await self._tell(self._policy.on_recovery, "on_recovery", news)
        self._open_line()

    async def _patiently(
        self, restart: Callable[[int], Coroutine[Any, Any, str | None]], run_id: str, after: str
    ) -> str | None:
        """Tries a restart, given the number of the attempt, as often as the policy allows."""
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
                        raise  # a mistake in the settings, or a wrong key: its own words say it best
                    failure = (
                        again
                        if isinstance(again, RecoveryError)
                        else RecoveryError(
                            f"the training {self._progress.name!r} could not be restarted after {after}: {again}",
                            run_id,
                        )
                    )
                    await self._tell(self._policy.on_failure, "on_failure", run_id, failure)
                    raise failure from again
                await asyncio.sleep(after_s)
                attempt += 1

    def _trying(self, run_id: str, attempt: int, path: str) -> None:
        self._sink.emit(RecoveryStarted(run_id, attempt, path))

    async def _tell(self, callback: Callable[..., Any] | None, name: str, *news: object) -> None:
        if callback is None:
            return
        try:
            await called(callback, *news)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the news stands whatever its reader does; the error is an event
            self._sink.emit(CallbackFailed(name, f"{type(error).__name__}: {error}"))

    # ---- the progress line ----

    def _open_line(self) -> None:
        total = self._batches.total
        if not self._show_progress or total is None or total <= self.position:
            return
        from tinkex.observability.terminal import training_line

        self._lines.close()
        self._line = self._lines.enter_context(training_line(total - self.position))

    def _show(self, step: Step[B]) -> None:
        if self._line is None or "loss" not in step.metrics:
            return
        datums = step.batch if isinstance(step.batch, list) else []
        counted = sum(getattr(getattr(one, "model_input", None), "length", 0) for one in datums)
        self._line.update(loss=step.metrics["loss"], num_tokens=int(step.metrics.get("num_tokens", counted)))


def _unheard(path: str) -> None:
    """A training that is opened is no recovery to tell of."""
