"""Watches runs, and has those restarted that cannot go on."""

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
from tinkex.futures import AwaitableConcurrentFuture
from tinkex.observability.events import RunCheckFailed, RunUnhealthy, guard
from tinkex.recovery.diagnosis import condition_of, says_gone
from tinkex.recovery.executor import RecoveryExecutor
from tinkex.recovery.policy import Condition, Recovered, RecoveryPolicy
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

ASKED_AT_ONCE = 8
MAX_FINISHED = 64
"""Runs whose restart is over and whose outcome late reports are still told."""


@dataclass
class _Watched:
    """A run under watch; only the background loop changes it."""

    run_id: str
    service: ServiceClient
    policy: RecoveryPolicy
    heard: float = field(default_factory=time.monotonic)
    known: Sequence[Checkpoint] = ()
    recovery: asyncio.Task[Recovered | None] | None = None
    """Its restart, from the first sign of trouble until all that follows is done."""


class RecoveryMonitor:
    """Asks the server about runs at intervals, and restarts a corrupted, lost or unreachable one.

    ::

        def switch(recovered):
            state.training = recovered.training

        with tinkex.recovery.RecoveryMonitor(service, RecoveryPolicy(on_recovery=switch)) as monitor:
            monitor.watch(training)
            ...

    A restarted run is watched on under its new id. An operation that fails may be the first sign of trouble: hand
    its error to :meth:`report` and the run is looked at, at once. All methods may be called from any thread; results
    are futures to wait for or to await.
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
        self._sink: Sink = guard(events)
        self._executor = executor or RecoveryExecutor(events=self._sink)
        self._watched: dict[str, _Watched] = {}
        self._settled: dict[str, _Watched] = {}
        self._lock = threading.Lock()
        self._rounds: Future[None] | None = None
        self._closed = False

    def watch(self, run: TrainingClient | str, policy: RecoveryPolicy | None = None) -> None:
        """Watches a run, by its client or id, under the monitor's policy or one of its own."""
        run_id = run if isinstance(run, str) else run.model_id
        self._add(_Watched(run_id, self._service, policy or self._policy))

    def stop_watching(self, run: TrainingClient | str) -> bool:
        """Watches a run no more; whether it was watched."""
        run_id = run if isinstance(run, str) else run.model_id
        with self._lock:
            return self._watched.pop(run_id, None) is not None

    @property
    def watched(self) -> tuple[str, ...]:
        """The ids of the runs under watch."""
        with self._lock:
            return tuple(self._watched)

    def check(self) -> APIFuture[dict[str, Condition | None]]:
        """Looks at every run, at once, and says how each is; restarts go on in the background."""
        return AwaitableConcurrentFuture(background().submit(self._round()))

    def report(self, run: TrainingClient | str, error: BaseException) -> APIFuture[Recovered | None]:
        """Looks at a run whose operation failed; the result is the new run if it had to be restarted, else None.

        Reports that come when the restart is over already get what came of it.
        """
        run_id = run if isinstance(run, str) else run.model_id
        with self._lock:
            watched = self._watched.get(run_id) or self._settled.get(run_id)
        if watched is None:
            raise ValueError(f"run {run_id} is not watched; call watch() first")
        return AwaitableConcurrentFuture(background().submit(self._reported(watched, error)))

    def close(self) -> None:
        """Ends the watch; restarts under way go on."""
        with self._lock:
            self._closed = True
            self._watched.clear()
            self._settled.clear()
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

    def _add(self, watched: _Watched) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError("this RecoveryMonitor was closed; make a new one")
            self._watched[watched.run_id] = watched
            if self._rounds is None or self._rounds.done():
                self._rounds = contextvars.Context().run(background().submit, self._keep_watch())

    # ---- on the background loop ----

    async def _keep_watch(self) -> None:
        """Rounds for as long as there is something to watch; each run is asked about at its own pace."""
        due: dict[str, float] = {}
        while runs := self._now_watched():
            now = time.monotonic()
            due = {run.run_id: due.get(run.run_id, now + run.policy.poll_interval_s) for run in runs}
            asked = [run for run in runs if due[run.run_id] <= now]
            await self._look_at(asked)
            for run in asked:
                due[run.run_id] = time.monotonic() + run.policy.poll_interval_s
            soonest = min(due[run.run_id] for run in runs)
            # A new run may be more urgent than those known: no sleep is longer than its first interval.
            shortest = min(run.policy.poll_interval_s for run in runs)
            await asyncio.sleep(min(max(soonest - time.monotonic(), 0.0), shortest))

    def _now_watched(self) -> list[_Watched]:
        with self._lock:
            return list(self._watched.values())

    async def _round(self) -> dict[str, Condition | None]:
        return await self._look_at(self._now_watched())

    async def _look_at(self, runs: Sequence[_Watched]) -> dict[str, Condition | None]:
        places = asyncio.Semaphore(ASKED_AT_ONCE)

        async def one(run: _Watched) -> Condition | None:
            async with places:
                return await self._look(run)

        conditions = await asyncio.gather(*(one(run) for run in runs))
        return {run.run_id: condition for run, condition in zip(runs, conditions, strict=True)}

    async def _look(self, run: _Watched) -> Condition | None:
        """How one run is; starts its recovery where it needs one."""
        if run.recovery is not None:
            return None
        answer = await self._ask(run)
        silent_s = time.monotonic() - run.heard
        condition = condition_of(answer, silent_s, run.policy.unreachable_after_s)
        if condition is not None:
            self._begin(run, condition, _reason(answer, silent_s))
        elif isinstance(answer, ClosedError):
            self.stop_watching(run.run_id)  # the program has done with the client: nobody is left to tell
        elif isinstance(answer, Exception):
            self._sink.emit(RunCheckFailed(run.run_id, f"{type(answer).__name__}: {answer}"))
        return condition

    async def _ask(self, run: _Watched) -> TrainingRun | Exception:
        try:
            rest = run.service.create_rest_client()
            async with asyncio.timeout(max(run.policy.poll_interval_s, 1.0)):
                answer = await rest.get_training_run_async(run.run_id)
                await self._remember(run, rest, answer)
        except (TinkexError, TimeoutError, OSError) as error:
            return error
        run.heard = time.monotonic()
        return answer

    async def _remember(self, run: _Watched, rest: RestClient, answer: TrainingRun) -> None:
        """Keeps in mind what the run could restart from, should the server forget it."""
        last = answer.last_checkpoint
        if last is not None and last.tinker_path not in {one.tinker_path for one in run.known}:
            run.known = await checkpoints_of(rest, run.run_id)

    async def _reported(self, run: _Watched, error: BaseException) -> Recovered | None:
        if run.recovery is not None:
            return await asyncio.shield(run.recovery)
        if says_gone(error):
            await self._ask(run)
            return await asyncio.shield(self._begin(run, "lost", f"{type(error).__name__}: {error}"))
        answer = await self._ask(run)
        condition = condition_of(answer, time.monotonic() - run.heard, run.policy.unreachable_after_s)
        if condition is None:
            return None
        return await asyncio.shield(self._begin(run, condition, _reason(answer, 0.0)))

    def _begin(self, run: _Watched, condition: Condition, reason: str) -> asyncio.Task[Recovered | None]:
        """Starts the recovery of a run; asked again while it is under way, gives the same one."""
        if run.recovery is None:
            self._sink.emit(RunUnhealthy(run.run_id, condition, reason))
            run.recovery = asyncio.ensure_future(self._restart(run, condition))
            run.recovery.add_done_callback(_noted)
        return run.recovery

    async def _restart(self, run: _Watched, condition: Condition) -> Recovered | None:
        try:
            recovered = await self._executor.recover(
                run.run_id, run.service, run.policy, condition=condition, known=run.known
            )
        except RecoveryError:
            self._settle(run)  # on_failure has been told; asking on would change nothing
            raise
        except asyncio.CancelledError:
            run.recovery = None  # somebody gave the restart up: the next round finds the run as it is
            raise
        if recovered is None:
            run.heard, run.recovery = time.monotonic(), None
        elif self._settle(run):
            self._add(_Watched(recovered.training.model_id, run.service, run.policy))
        return recovered

    def _settle(self, run: _Watched) -> bool:
        """Ends the watch over a run whose restart is over, and keeps the outcome; whether it was still watched."""
        with self._lock:
            self._settled[run.run_id] = run
            while len(self._settled) > MAX_FINISHED:
                del self._settled[next(iter(self._settled))]
            return self._watched.pop(run.run_id, None) is not None


def _reason(answer: TrainingRun | Exception, silent_s: float) -> str:
    if isinstance(answer, TrainingRun):
        return "the server says that its weights are damaged"
    return f"{type(answer).__name__}: {answer}" + (
        f" ({silent_s:.0f} s without an answer)" if silent_s >= 1 else ""
    )


def _noted(task: asyncio.Task[Recovered | None]) -> None:
    """Reads the error of a recovery nobody waits for; the executor has told whoever wants to know."""
    if not task.cancelled():
        task.exception()
