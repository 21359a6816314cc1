"""Restarts runs, with bounded concurrency and retries."""

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
from tinkex.observability.events import CallbackFailed, RecoveryFailed, RecoveryStarted, RunRecovered
from tinkex.observability.process import bus_for
from tinkex.recovery.diagnosis import condition_of, outcome_of, says_gone
from tinkex.recovery.policy import Condition, RecoveryPolicy, RecoveryResult
from tinkex.recovery.restoring import call_user_function, checkpoints_of, paths_for, restore_first
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
    """Restarts runs from their checkpoints, at most ``max_concurrent`` concurrently.

    ::

        executor = tinkex.recovery.RecoveryExecutor()
        recovered = executor.recover(run_id, service).result()
        training = recovered.training

    A run that waits for its next attempt frees its slot. For a run whose restart is in flight, ``recover`` returns the
    same future.
    """

    def __init__(
        self,
        *,
        max_concurrent: int = 2,
        events: Sink | None = None,
        rng: Callable[[], float] = random.random,
    ) -> None:
        if isinstance(max_concurrent, bool) or not isinstance(max_concurrent, int) or max_concurrent < 1:
            raise ValueError(f"max_concurrent must be an integer ≥ 1, got {max_concurrent!r}")
        self._sink: Sink = bus_for(events)
        self._rng = rng
        self._max_concurrent = max_concurrent
        self._slots: asyncio.Semaphore | None = None
        self._in_flight: dict[str, AwaitableConcurrentFuture[RecoveryResult | None]] = {}
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
    ) -> APIFuture[RecoveryResult | None]:
        """Restarts a run; the result is the new one, or None if an ``unreachable`` one turned out healthy.

        ``known`` are checkpoints to fall back on if the server has lost the run. ``user_metadata`` is for the new run;
        by default it is that of the old one.
        """
        job = _Job(run_id, service, policy or RecoveryPolicy(), condition, tuple(known), user_metadata)
        with self._lock:
            in_flight = self._in_flight.get(run_id)
            if in_flight is not None:
                return in_flight
            future = background().submit(self._recover(job))
            self._in_flight[run_id] = started = future
        # Outside the lock: the callback of a finished recovery runs immediately.
        future.call_when_done(lambda _: self._forget(run_id))
        return started

    @property
    def in_flight(self) -> tuple[str, ...]:
        """The runs that are being restarted or wait for a slot."""
        with self._lock:
            return tuple(self._in_flight)

    def _forget(self, run_id: str) -> None:
        with self._lock:
            self._in_flight.pop(run_id, None)

    # ---- on the background loop ----

    async def _recover(self, job: _Job) -> RecoveryResult | None:
        if self._slots is None:
            self._slots = asyncio.Semaphore(self._max_concurrent)
        began, attempt = time.monotonic(), 0
        while True:
            try:
                async with self._slots:
                    recovered = await self._attempt(job, attempt)
            except Exception as error:  # any error is emitted and ends or repeats the attempt
                step = self._next_step(job, error, attempt, time.monotonic() - began)
                reason = f"{type(error).__name__}: {error}"
                after_s = step.after if isinstance(step, Retry) else None
                self._sink.emit(RecoveryFailed(job.run_id, attempt, reason, after_s))
                if after_s is None:
                    raise await self._failure(job, error, attempt) from error
                await asyncio.sleep(after_s)
                attempt += 1
            else:
                if recovered is not None:
                    self._sink.emit(
                        RunRecovered(job.run_id, recovered.training.model_id, recovered.checkpoint, attempt)
                    )
                    await self._call_back(job.policy.on_recovery, "on_recovery", recovered)
                return recovered

    def _next_step(self, job: _Job, error: Exception, attempt: int, elapsed: float) -> Retry | GiveUp:
        outcome = outcome_of(error)
        if isinstance(outcome, GiveUp):
            return outcome
        return decide(outcome, attempt, elapsed, job.policy.retries, self._rng)

    async def _attempt(self, job: _Job, attempt: int) -> RecoveryResult | None:
        service = job.service
        run = await self._fetch_run(service, job.run_id)
        if job.condition == "unreachable" and run is not None and condition_of(run, 0, 1) is None:
            return None  # only the connection had failed: the run is unchanged
        await service.renew_session_async()  # if the run is lost, its session may be lost too
        checkpoints = await checkpoints_of(service.create_rest_client(), job.run_id, job.known)
        paths = await paths_for(job.policy, job.run_id, checkpoints)
        metadata = job.user_metadata if run is None or job.user_metadata is not None else run.user_metadata
        training, path = await restore_first(
            service,
            job.run_id,
            paths,
            optimizer=job.policy.restore_optimizer,
            user_metadata=metadata,
            on_attempt=lambda path: self._sink.emit(RecoveryStarted(job.run_id, attempt, path)),
        )
        return RecoveryResult(job.run_id, training, path, attempt + 1, job.condition)

    async def _fetch_run(self, service: ServiceClient, run_id: str) -> TrainingRun | None:
        try:
            return await service.create_rest_client().get_training_run_async(run_id)
        except APIStatusError as error:
            if says_gone(error):
                return None
            raise

    async def _failure(self, job: _Job, error: Exception, attempt: int) -> RecoveryError:
        failure = (
            error
            if isinstance(error, RecoveryError)
            else RecoveryError(
                f"run {job.run_id} is {job.condition} and could not be restarted in {attempt + 1} "
                f"attempt{'s' if attempt else ''}: {error}",
                job.run_id,
            )
        )
        await self._call_back(job.policy.on_failure, "on_failure", job.run_id, failure)
        return failure

    async def _call_back(self, callback: Callable[..., object] | None, name: str, *arguments: object) -> None:
        if callback is None:
            return
        try:
            await call_user_function(callback, *arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - emitted as an event; the recovery continues
            self._sink.emit(CallbackFailed(name, f"{type(error).__name__}: {error}"))
