"""Polls runs, and restarts those that cannot continue."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tinkex._runtime import background
from tinkex.errors import ClosedError, RecoveryError, TinkexError
from tinkex.observability.events import RunCheckFailed, RunUnhealthy
from tinkex.observability.process import bus_for
from tinkex.recovery.diagnosis import condition_of, says_gone
from tinkex.recovery.executor import RecoveryExecutor
from tinkex.recovery.policy import Condition, RecoveryPolicy, RecoveryResult
from tinkex.recovery.restoring import checkpoints_of
from tinkex.types import Checkpoint, TrainingRun

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tinkex.clients.rest import RestClient
    from tinkex.clients.service import ServiceClient
    from tinkex.clients.training import TrainingClient
    from tinkex.futures import APIFuture
    from tinkex.observability.events import Sink

__all__ = ["RecoveryMonitor"]

MAX_CONCURRENT_CHECKS = 8
MAX_FINISHED = 64
"""Number of finished restarts whose results are kept for late reports."""


@dataclass
class _MonitoredRun:
    """A monitored run; only the background loop changes it."""

    run_id: str
    service: ServiceClient
    policy: RecoveryPolicy
    last_response: float = field(default_factory=time.monotonic)
    known: Sequence[Checkpoint] = ()
    recovery: asyncio.Task[RecoveryResult | None] | None = None
    """Its restart, from the first failure until the callbacks have returned."""


class RecoveryMonitor:
    """Polls the server for the state of runs, and restarts corrupted, lost or unreachable ones.

    ::

        def switch(recovered):
            state.training = recovered.training

        with tinkex.recovery.RecoveryMonitor(service, RecoveryPolicy(on_recovery=switch)) as monitor:
            monitor.watch(training)
            ...

    A restarted run is monitored under its new id. If an operation fails, pass its error to :meth:`report`, which checks
    the run immediately. All methods are thread-safe; results are futures to wait for or to await.
    """

    def __init__(
        self,
        service: ServiceClient,
        policy: RecoveryPolicy | None = None,
        *,
        executor: RecoveryExecutor | None = None,
        events: Sink | None = None,
    ) -> None:
        self._service = service
        self._policy = policy or RecoveryPolicy()
        self._sink: Sink = bus_for(events)
        self._executor = executor or RecoveryExecutor(events=self._sink)
        self._watched: dict[str, _MonitoredRun] = {}
        self._finished: dict[str, _MonitoredRun] = {}
        self._lock = threading.Lock()
        self._rounds: Future[None] | None = None
        self._closed = False

    def watch(self, run: TrainingClient | str, policy: RecoveryPolicy | None = None) -> None:
        """Starts to monitor a run, by its client or id, with the monitor's policy or its own."""
        run_id = run if isinstance(run, str) else run.model_id
        self._add(_MonitoredRun(run_id, self._service, policy or self._policy))

    def stop_watching(self, run: TrainingClient | str) -> bool:
        """Stops monitoring a run; returns whether it was monitored."""
        run_id = run if isinstance(run, str) else run.model_id
        with self._lock:
            return self._watched.pop(run_id, None) is not None

    @property
    def watched(self) -> tuple[str, ...]:
        """The ids of the monitored runs."""
        with self._lock:
            return tuple(self._watched)

    def check(self) -> APIFuture[dict[str, Condition | None]]:
        """Checks every run now and returns the condition of each; restarts continue in the background."""
        return background().submit(self._round())

    def report(self, run: TrainingClient | str, error: BaseException) -> APIFuture[RecoveryResult | None]:
        """Checks a run whose operation failed; the result is the new run if it had to be restarted, else None.

        A report after the restart returns the result of that restart.
        """
        run_id = run if isinstance(run, str) else run.model_id
        with self._lock:
            watched = self._watched.get(run_id) or self._finished.get(run_id)
        if watched is None:
            raise ValueError(f"run {run_id} is not watched; call watch() first")
        return background().submit(self._reported(watched, error))

    def close(self) -> None:
        """Stops monitoring; restarts in flight continue."""
        with self._lock:
            self._closed = True
            self._watched.clear()
            self._finished.clear()
            rounds, self._rounds = self._rounds, None
        if rounds is not None:
            rounds.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, watched: _MonitoredRun) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError("this RecoveryMonitor was closed; create a new one")
            self._watched[watched.run_id] = watched
            if self._rounds is None or self._rounds.done():
                self._rounds = contextvars.Context().run(background().submit, self._poll_loop())

    # ---- on the background loop ----

    async def _poll_loop(self) -> None:
        """Polls while there are runs to monitor, each at its own interval."""
        due: dict[str, float] = {}
        while runs := self._monitored():
            now = time.monotonic()
            due = {run.run_id: due.get(run.run_id, now + run.policy.poll_interval_s) for run in runs}
            due_runs = [run for run in runs if due[run.run_id] <= now]
            await self._check_runs(due_runs)
            for run in due_runs:
                due[run.run_id] = time.monotonic() + run.policy.poll_interval_s
            soonest = min(due[run.run_id] for run in runs)
            # A run added meanwhile may be due earlier: no sleep is longer than the shortest interval.
            shortest = min(run.policy.poll_interval_s for run in runs)
            await asyncio.sleep(min(max(soonest - time.monotonic(), 0.0), shortest))

    def _monitored(self) -> list[_MonitoredRun]:
        with self._lock:
            return list(self._watched.values())

    async def _round(self) -> dict[str, Condition | None]:
        return await self._check_runs(self._monitored())

    async def _check_runs(self, runs: Sequence[_MonitoredRun]) -> dict[str, Condition | None]:
        slots = asyncio.Semaphore(MAX_CONCURRENT_CHECKS)

        async def one(run: _MonitoredRun) -> Condition | None:
            async with slots:
                return await self._check_run(run)

        conditions = await asyncio.gather(*(one(run) for run in runs))
        return {run.run_id: condition for run, condition in zip(runs, conditions, strict=True)}

    async def _check_run(self, run: _MonitoredRun) -> Condition | None:
        """Returns the condition of a run; starts its recovery if needed."""
        if run.recovery is not None:
            return None
        answer = await self._fetch_run(run)
        silent_s = time.monotonic() - run.last_response
        condition = condition_of(answer, silent_s, run.policy.unreachable_after_s)
        if condition is not None:
            self._begin(run, condition, _reason(answer, silent_s))
        elif isinstance(answer, ClosedError):
            self.stop_watching(run.run_id)  # the program has closed the client
        elif isinstance(answer, Exception):
            self._sink.emit(RunCheckFailed(run.run_id, f"{type(answer).__name__}: {answer}"))
        return condition

    async def _fetch_run(self, run: _MonitoredRun) -> TrainingRun | Exception:
        try:
            rest = run.service.create_rest_client()
            async with asyncio.timeout(max(run.policy.poll_interval_s, 1.0)):
                answer = await rest.get_training_run_async(run.run_id)
                await self._remember(run, rest, answer)
        except (TinkexError, TimeoutError, OSError) as error:
            return error
        run.last_response = time.monotonic()
        return answer

    async def _remember(self, run: _MonitoredRun, rest: RestClient, answer: TrainingRun) -> None:
        """Caches the checkpoints of the run, in case the server loses it."""
        last = answer.last_checkpoint
        if last is not None and last.tinker_path not in {one.tinker_path for one in run.known}:
            run.known = await checkpoints_of(rest, run.run_id)

    async def _reported(self, run: _MonitoredRun, error: BaseException) -> RecoveryResult | None:
        if run.recovery is not None:
            return await asyncio.shield(run.recovery)
        if says_gone(error):
            await self._fetch_run(run)
            return await asyncio.shield(self._begin(run, "lost", f"{type(error).__name__}: {error}"))
        answer = await self._fetch_run(run)
        condition = condition_of(answer, time.monotonic() - run.last_response, run.policy.unreachable_after_s)
        if condition is None:
            return None
        return await asyncio.shield(self._begin(run, condition, _reason(answer, 0.0)))

    def _begin(
        self, run: _MonitoredRun, condition: Condition, reason: str
    ) -> asyncio.Task[RecoveryResult | None]:
        """Starts the recovery of a run; returns the same task while it is in flight."""
        if run.recovery is None:
            self._sink.emit(RunUnhealthy(run.run_id, condition, reason))
            run.recovery = asyncio.ensure_future(self._restart(run, condition))
            run.recovery.add_done_callback(_retrieve_exception)
        return run.recovery

    async def _restart(self, run: _MonitoredRun, condition: Condition) -> RecoveryResult | None:
        try:
            recovered = await self._executor.recover(
                run.run_id, run.service, run.policy, condition=condition, known=run.known
            )
        except RecoveryError:
            self._finish(run)  # on_failure was called; further polling would change nothing
            raise
        except asyncio.CancelledError:
            run.recovery = None  # the restart was cancelled: the next poll checks the run again
            raise
        if recovered is None:
            run.last_response, run.recovery = time.monotonic(), None
        elif self._finish(run):
            self._add(_MonitoredRun(recovered.training.model_id, run.service, run.policy))
        return recovered

    def _finish(self, run: _MonitoredRun) -> bool:
        """Stops monitoring a run after its restart and keeps the result; returns whether it was still monitored."""
        with self._lock:
            self._finished[run.run_id] = run
            while len(self._finished) > MAX_FINISHED:
                del self._finished[next(iter(self._finished))]
            return self._watched.pop(run.run_id, None) is not None


def _reason(answer: TrainingRun | Exception, silent_s: float) -> str:
    if isinstance(answer, TrainingRun):
        return "the server reports corrupt weights"
    return f"{type(answer).__name__}: {answer}" + (
        f" ({silent_s:.0f} s without a response)" if silent_s >= 1 else ""
    )


def _retrieve_exception(task: asyncio.Task[RecoveryResult | None]) -> None:
    """Retrieves the exception of a recovery without a waiter; the executor has emitted it."""
    if not task.cancelled():
        task.exception()
