"""Restarts runs: a few at a time, each as often as its policy allows."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkex._runtime import background
from tinkex._transport.retry import GiveUp, Retry, decide
from tinkex.errors import APIStatusError, RecoveryError
from tinkex.futures import AwaitableConcurrentFuture
from tinkex.observability.events import CallbackFailed, RecoveryFailed, RecoveryStarted, RunRecovered, guard
from tinkex.recovery.diagnosis import condition_of, outcome_of, says_gone
from tinkex.recovery.policy import Condition, Recovered, RecoveryPolicy
from tinkex.recovery.restoring import called, checkpoints_of, paths_for, restore_first
from tinkex.types import Checkpoint, TrainingRun

if TYPE_CHECKING:
    from tinkex.clients.service import ServiceClient
    from tinkex.futures import APIFuture
    from tinkex.observability.events import Sink

__all__ = ["RecoveryExecutor"]


@dataclass(frozen=True)
class _Job:
    run_id: str
    service: ServiceClient
    policy: RecoveryPolicy
    condition: Condition
    known: Sequence[Checkpoint]
    user_metadata: dict[str, str] | None


class RecoveryExecutor:
    """Restarts runs from their checkpoints, at most ``max_concurrent`` at the same time.

    ::

        executor = tinkex.recovery.RecoveryExecutor()
        recovered = executor.recover(run_id, service).result()
        training = recovered.training

    A run that waits for its next attempt leaves its place to others. Asking for a run that is being restarted
    gives the same future again.
    """

    def __init__(
        self,
        *,
        max_concurrent: int = 2,
        events: Sink | None = None,
        dice: Callable[[], float] = random.random,
    ) -> None:
        if isinstance(max_concurrent, bool) or not isinstance(max_concurrent, int) or max_concurrent < 1:
            raise ValueError(f"max_concurrent is a whole number from 1 up, got {max_concurrent!r}")
        self._sink: Sink = guard(events)
        self._dice = dice
        self._max_concurrent = max_concurrent
        self._places: asyncio.Semaphore | None = None
        self._under_way: dict[str, AwaitableConcurrentFuture[Recovered | None]] = {}
        self._lock = threading.Lock()

    def recover(
        self,
        run_id: str,
        service: ServiceClient,
        policy: RecoveryPolicy | None = None,
        *,
        condition: Condition = "lost",
        known: Sequence[Checkpoint] = (),
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[Recovered | None]:
        """Restarts a run; the result is the new one, or None where an ``unreachable`` one turned out well.

        ``known`` are checkpoints to fall back on where the server has forgotten the run. ``user_metadata`` goes
        to the new run; by default that of the old one.
        """
        job = _Job(run_id, service, policy or RecoveryPolicy(), condition, tuple(known), user_metadata)
        with self._lock:
            under_way = self._under_way.get(run_id)
            if under_way is not None:
                return under_way
            started = AwaitableConcurrentFuture(background().submit(self._recover(job)))
            self._under_way[run_id] = started
        # Outside the lock: a recovery that has ended already calls back at once.
        started.future().add_done_callback(lambda _: self._forget(run_id))
        return started

    @property
    def under_way(self) -> tuple[str, ...]:
        """The runs that are being restarted, or wait for it."""
        with self._lock:
            return tuple(self._under_way)

    def _forget(self, run_id: str) -> None:
        with self._lock:
            self._under_way.pop(run_id, None)

    # ---- on the background loop ----

    async def _recover(self, job: _Job) -> Recovered | None:
        if self._places is None:
            self._places = asyncio.Semaphore(self._max_concurrent)
        began, attempt = time.monotonic(), 0
        while True:
            try:
                async with self._places:
                    recovered = await self._attempt(job, attempt)
            except Exception as error:  # whatever it is, it is told, and the run is not left in between
                step = self._next_step(job, error, attempt, time.monotonic() - began)
                reason = f"{type(error).__name__}: {error}"
                after_s = step.after if isinstance(step, Retry) else None
                self._sink.emit(RecoveryFailed(job.run_id, attempt, reason, after_s))
                if after_s is None:
                    raise await self._given_up(job, error, attempt) from error
                await asyncio.sleep(after_s)
                attempt += 1
            else:
                if recovered is not None:
                    self._sink.emit(
                        RunRecovered(job.run_id, recovered.training.model_id, recovered.checkpoint, attempt)
                    )
                    await self._tell(job.policy.on_recovery, "on_recovery", recovered)
                return recovered

    def _next_step(self, job: _Job, error: Exception, attempt: int, elapsed: float) -> Retry | GiveUp:
        outcome = outcome_of(error)
        if isinstance(outcome, GiveUp):
            return outcome
        return decide(outcome, attempt, elapsed, job.policy.retries, self._dice)

    async def _attempt(self, job: _Job, attempt: int) -> Recovered | None:
        service = job.service
        run = await self._ask(service, job.run_id)
        if job.condition == "unreachable" and run is not None and condition_of(run, 0, 1) is None:
            return None  # it was only the way to the server: the run is as it was
        await service.renew_session_async()  # where the run is lost, its session may be as well
        checkpoints = await checkpoints_of(service.create_rest_client(), job.run_id, job.known)
        paths = await paths_for(job.policy, job.run_id, checkpoints)
        metadata = job.user_metadata if run is None or job.user_metadata is not None else run.user_metadata
        training, path = await restore_first(
            service,
            job.run_id,
            paths,
            optimizer=job.policy.restore_optimizer,
            user_metadata=metadata,
            trying=lambda path: self._sink.emit(RecoveryStarted(job.run_id, attempt, path)),
        )
        return Recovered(job.run_id, training, path, attempt + 1, job.condition)

    async def _ask(self, service: ServiceClient, run_id: str) -> TrainingRun | None:
        try:
            return await service.create_rest_client().get_training_run_async(run_id)
        except APIStatusError as error:
            if says_gone(error):
                return None
            raise

    async def _given_up(self, job: _Job, error: Exception, attempt: int) -> RecoveryError:
        failure = (
            error
            if isinstance(error, RecoveryError)
            else RecoveryError(
                f"run {job.run_id} is {job.condition} and could not be restarted in {attempt + 1} "
                f"attempt{'s' if attempt else ''}: {error}",
                job.run_id,
            )
        )
        await self._tell(job.policy.on_failure, "on_failure", job.run_id, failure)
        return failure

    async def _tell(self, callback: Callable[..., object] | None, name: str, *news: object) -> None:
        if callback is None:
            return
        try:
            await called(callback, *news)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the news stands whatever its reader does; the error is an event
            self._sink.emit(CallbackFailed(name, f"{type(error).__name__}: {error}"))
