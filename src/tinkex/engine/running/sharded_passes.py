"""Data-parallel passes: trainers without work of their own compute shards of a pass that is too large for its trainer.

The home trainer owns the run. It adds the gradients of all shards in the order of their numbers, and computes every shard that
no other trainer takes, or that one fails to return. So how many trainers help changes when the pass ends, and no number.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinkex.engine.lanes.interface import Backend, PassJob, PassReport, ShardTask, WorkerLost
from tinkex.engine.lanes.lane import Lane
from tinkex.engine.operation import Operation
from tinkex.engine.served_models import ServedModel
from tinkex.engine.trainer.prefixes import MIN_SAVED
from tinkex.engine.trainer.shards import count_shards, plan_shards
from tinkex.errors import EngineFailure, TinkexError

if TYPE_CHECKING:
    from tinkex.engine.config import EngineConfig
    from tinkex.engine.model.adapter_copy import AdapterCopy
    from tinkex.engine.trainer.shards import ShardResult

logger = logging.getLogger("tinkex.engine")

MAX_GRADIENT_BYTES = 2**30
"""Gradients of the shards of one pass that exist at a time; shards far behind the first one that is missing are not started."""
MIN_PATIENCE_S = 1.0
PATIENCE = 4.0
"""How many times longer than the home trainer's slowest shard another trainer may take before the home trainer computes it too."""


@dataclass(frozen=True)
class RunAdapter:
    """The weights of a run: ``key`` names the run and their version; ``num_bytes`` is their size, and that of a gradient."""

    model: ServedModel
    key: str
    num_bytes: int


@dataclass(frozen=True)
class ShardPlan:
    """How a pass is cut: the datums of each shard, and the compute threads; 0 are those of the lane."""

    shards: Sequence[Sequence[int]]
    threads: int


class ShardedPass:
    """The shards of one pass: open, taken by a trainer, or done. Safe on any thread, ``run`` is the home trainer's.

    Example:
        >>> sharded = ShardedPass(backend, adapter, job, plan, share_prefixes=True)
        >>> report = sharded.run(exchange)
    """

    def __init__(
        self,
        home: Backend,
        adapter: RunAdapter,
        job: PassJob,
        plan: ShardPlan,
        *,
        share_prefixes: bool,
    ) -> None:
        self.adapter = adapter
        """What it runs on."""
        self._home = home
        self._job = job
        self._plan = plan
        self._share_prefixes = share_prefixes
        self._window = max(MAX_GRADIENT_BYTES // max(adapter.num_bytes, 1), 2)
        self._changed = threading.Condition()
        self._open = list(range(len(plan.shards)))
        self._taken: set[int] = set()
        self._returned: set[int] = set()
        """Shards that another trainer failed to compute: the home trainer does."""
        self._done: set[int] = set()
        self._received: dict[int, ShardResult] = {}
        """Results of other trainers that the home trainer has not added yet."""
        self._first_missing = 0
        self._has_failed = False
        self._takes_help = True
        self._is_closed = False
        self._copy: AdapterCopy | None = None
        self._copying = threading.Lock()
        self.num_helped = 0
        """How many shards other trainers have computed."""

    # ---- the home trainer

    def run(self, exchange: ShardExchange | None) -> PassReport | None:
        """Compute the pass, with the help that ``exchange`` finds; returns None, with the run unchanged, if a shard failed."""
        plan = self._plan
        self._home.begin_shards(
            self._job, plan.shards, share_prefixes=self._share_prefixes, threads=plan.threads
        )
        report: PassReport | None = None
        try:
            self._compute(exchange)
            if not self._has_failed:
                report = self._home.end_shards()
        finally:
            if report is None:
                self._home.discard_shards()
        return report

    def _compute(self, exchange: ShardExchange | None) -> None:
        own = self._take_own(0.0)  # before others can take it
        longest = 0.0
        with exchange.offer(self, self._job.run_id) if exchange is not None else nullcontext():
            while True:
                if own is not None:
                    started = time.monotonic()
                    if not self._home.compute_shard(own):
                        self._fail()
                    self._end_own(own)
                    longest = max(longest, time.monotonic() - started)
                for number, result in self._take_received().items():
                    self._home.add_shard(number, result)
                if self._is_over:
                    return
                if exchange is not None and self.has_open:
                    exchange.wake()
                own = self._take_own(max(MIN_PATIENCE_S, PATIENCE * longest))

    @property
    def _is_over(self) -> bool:
        with self._changed:
            return self._has_failed or (len(self._done) == len(self._plan.shards) and not self._received)

    def _take_received(self) -> Mapping[int, ShardResult]:
        with self._changed:
            received, self._received = self._received, {}
            return received

    def _take_own(self, patience_s: float) -> int | None:
        """The next shard for the home trainer; None if there is something else to do. Waits while others have all that are left.

        If none of them ends for a while, the first one is computed here too; whichever result comes first counts.
        """
        with self._changed:
            if self._taken and not self._has_changed:
                if self._changed.wait_for(lambda: self._has_changed, patience_s):
                    return None
                return min(self._taken)
            if self._has_failed or not self._can_take(self._open):
                return None
            return self._open.pop(0)

    def _end_own(self, number: int) -> None:
        with self._changed:
            self._received.pop(number, None)
            self._taken.discard(number)
            if number in self._open:  # another trainer returned it meanwhile
                self._open.remove(number)
            self._end(number)

    def _fail(self) -> None:
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()

    # ---- other trainers

    @property
    def has_open(self) -> bool:
        """Whether another trainer could compute a shard."""
        with self._changed:
            return self._takes_help and self._next_for_others() is not None

    def take(self) -> int | None:
        """Take a shard for another trainer; None if there is none left."""
        with self._changed:
            number = self._next_for_others() if self._takes_help else None
            if number is not None:
                self._open.remove(number)
                self._taken.add(number)
            return number

    def task(self, number: int) -> ShardTask:
        """A shard as another trainer computes it."""
        job = self._job
        return ShardTask(
            self.adapter.model.source,
            self.adapter.key,
            job.loss_fn,
            [job.examples[index] for index in self._plan.shards[number]],
            job.backward,
            self._share_prefixes,
            self._plan.threads,
        )

    def copy_adapter(self) -> AdapterCopy | None:
        """The weights of the run; None if the pass is over, or its trainer cannot send them."""
        with self._copying:
            copy = self._copy
            if copy is None and self._takes_help:
                try:
                    copy = self._home.copy_adapter(self._job.run_id, self.adapter.key)
                except WorkerLost:  # the home trainer reports it
                    self.refuse_help()
                self._copy = None if self._is_closed else copy
            return copy

    def complete(self, number: int, result: ShardResult) -> None:
        """Hand in a shard; ignored if the pass is over, or the shard was computed elsewhere meanwhile."""
        with self._changed:
            self._taken.discard(number)
            if number in self._done or self._is_closed:
                return
            if isinstance(result.output, EngineFailure):
                self._return(number)  # it lacked memory, which the home trainer may have
            elif isinstance(result.output, TinkexError):
                self._has_failed = True
            else:
                self._received[number] = result
                self.num_helped += 1
                self._end(number)
            self._changed.notify_all()

    def give_back(self, number: int) -> None:
        """Return a shard that could not be computed; the home trainer computes it."""
        with self._changed:
            if number in self._taken:
                self._taken.remove(number)
                self._return(number)
                self._changed.notify_all()

    def refuse_help(self) -> None:
        """Give out no more shards; the home trainer computes those that are open."""
        with self._changed:
            self._takes_help = False

    def close(self) -> None:
        """Give out no more shards, and take no more results: the pass is over."""
        with self._changed:
            self._takes_help, self._is_closed = False, True
            self._received.clear()
            self._copy = None

    # ---- with the lock

    def _next_for_others(self) -> int | None:
        free = [number for number in self._open if number not in self._returned]
        return free[0] if self._can_take(free) else None

    @property
    def _has_changed(self) -> bool:
        """Whether the home trainer has something to do other than to wait."""
        return self._can_take(self._open) or bool(self._received) or self._has_failed

    def _can_take(self, numbers: Sequence[int]) -> bool:
        return bool(numbers) and numbers[0] < self._first_missing + self._window

    def _return(self, number: int) -> None:
        self._returned.add(number)
        insort(self._open, number)

    def _end(self, number: int) -> None:
        self._done.add(number)
        while self._first_missing in self._done:
            self._first_missing += 1


class ShardExchange:
    """Where trainers find shards of the passes of others. Safe on any thread; ``wake`` has the loop plan again.

    Example:
        >>> exchange = ShardExchange(loop.wake)
        >>> exchange.find() is None
        True
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self._lock = threading.Lock()
        self._passes: list[ShardedPass] = []
        self._adapters: dict[str, str] = {}

    @contextmanager
    def offer(self, sharded: ShardedPass, run_id: str) -> Iterator[None]:
        """Let other trainers compute shards of a pass while the block runs."""
        with self._lock:
            self._passes.append(sharded)
            self._adapters[run_id] = sharded.adapter.key
        self.wake()
        try:
            yield
        finally:
            sharded.close()
            with self._lock:
                self._passes.remove(sharded)

    def find(self) -> ShardedPass | None:
        """The pass that has waited longest for help."""
        if not self._passes:
            return None
        with self._lock:
            return next((sharded for sharded in self._passes if sharded.has_open), None)

    def retire(self, *run_ids: str) -> None:
        """Record that the weights of runs have changed, or are gone: copies of them are of no use any more."""
        if self._adapters:
            with self._lock:
                for run_id in run_ids:
                    self._adapters.pop(run_id, None)

    def is_current(self, adapter: str) -> bool:
        """Whether copies of these weights may be used again."""
        with self._lock:
            return adapter in self._adapters.values()


class ShardedPasses:
    """Cuts the passes of one trainer that are too large for it, and runs them. Called on the lane's thread."""

    def __init__(self, config: EngineConfig, home: Backend, exchange: ShardExchange) -> None:
        self._max_tokens = config.shard_tokens
        self._threads = config.threads or 0
        self._home = home
        self._exchange = exchange

    def run(
        self,
        operation: Operation,
        job: PassJob,
        adapter: RunAdapter,
        cut: tuple[int, int] | None,
        *,
        prefix_sharing: bool,
    ) -> Sequence[PassReport] | None:
        """Run a pass in shards; returns None, with nothing changed, if it is to run as a whole.

        ``cut`` is the number of shards and of their threads that it is repeated with; None decides it by its distinct tokens.
        Only built-in losses are cut: they are sums over datums. If a shard fails, the whole pass runs, and fails as it would have.
        """
        operation.num_shards, operation.shard_threads = 1, 0
        if job.custom_loss is not None:
            return None
        tokens = [example.tokens_N for example in job.examples]
        min_saved = MIN_SAVED if prefix_sharing else None
        if cut is not None:
            num_shards, threads = cut
        elif self._max_tokens is not None and operation.tokens_computed > self._max_tokens:
            num_shards, threads = count_shards(tokens, self._max_tokens, min_saved), self._threads
        else:
            return None
        if num_shards == 1:
            return None
        plan = ShardPlan(plan_shards(tokens, num_shards, min_saved), threads)
        sharded = ShardedPass(self._home, adapter, job, plan, share_prefixes=prefix_sharing)
        # What was interrupted before may be what crashed a trainer: then it crashes no others.
        report = sharded.run(self._exchange if operation.attempt == 1 else None)
        if report is None:
            return None
        operation.num_shards, operation.shard_threads = num_shards, threads
        number, run_id, num_helped = operation.seq_id, operation.run_id, sharded.num_helped
        logger.debug(
            "pass %d of run %s: %d shards, %d by other trainers", number, run_id, num_shards, num_helped
        )
        return [report]


class AdapterCopies:
    """The copies in the memory of a lane, with their sizes. Changed on the lane's thread, read on any."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._sizes: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Their memory."""
        return sum(tuple(self._sizes.values()))

    def __contains__(self, adapter: object) -> bool:
        return adapter in self._sizes

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._sizes))

    def keep(self, source: str, copy: AdapterCopy) -> None:
        """Keep a copy."""
        self._backend.keep_copy(source, copy)
        self._sizes[copy.key] = copy.params.nbytes

    def drop(self, adapters: Sequence[str]) -> None:
        """Drop copies, if they are there."""
        for adapter in adapters:
            if self._sizes.pop(adapter, None) is not None:
                self._backend.drop_copy(adapter)

    def clear(self) -> None:
        """Forget all of them: their backend is gone."""
        self._sizes.clear()


@dataclass(frozen=True, eq=False)
class ShardJob:
    """Computes shards of a pass of another trainer, until none is left or something else waits for the lane."""

    sharded: ShardedPass
    copies: AdapterCopies = field(repr=False)

    def run(self, lane: Lane) -> None:
        """Compute them. If this lane is lost, or cannot compute one, the home trainer does."""
        sharded, backend = self.sharded, lane.backend
        try:
            sharded.adapter.model.load_on(backend)
        except TinkexError as error:
            logger.warning("%s cannot help with a pass: %s", lane.name, error)
            sharded.refuse_help()
        while (number := sharded.take()) is not None:
            try:
                result = self._compute(backend, number)
            except WorkerLost:
                sharded.give_back(number)
                raise
            except Exception:
                logger.exception("%s could not compute a shard of a pass", lane.name)
                result = None
            if result is None:
                sharded.give_back(number)
                sharded.refuse_help()
                return
            sharded.complete(number, result)
            if lane.is_wanted:
                return

    def _compute(self, backend: Backend, number: int) -> ShardResult | None:
        task = self.sharded.task(number)
        result = backend.run_shard(task) if task.adapter in self.copies else None
        if result is None:
            copy = self.sharded.copy_adapter()
            if copy is None:
                return None
            self.copies.keep(task.source, copy)
            result = backend.run_shard(task)
        return result
