"""Replay: a run is restored from its last savepoint and the journal since it, turn by turn.

The turns are repeated as they were, with the same operations in the same passes, so the weights are the same to the
last bit. Results were committed then and stay as they are; nothing is saved or reported a second time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from tinkex._wire import proto as wire_proto
from tinkex.engine.durability.eviction import Eviction
from tinkex.engine.durability.savepoints import SavepointWriter
from tinkex.engine.encoding import decode_request
from tinkex.engine.lanes.interface import CorruptState, WorkerLost
from tinkex.engine.lanes.lane import Lane
from tinkex.engine.operation import Kind, Operation
from tinkex.engine.running.training import TrainingRuns
from tinkex.engine.scheduler import Turn
from tinkex.engine.store import FutureStatus, Outcome, ResultFormat, RunStatus, Store, TurnEntry
from tinkex.engine.store.changes import Change

logger = logging.getLogger("tinkex.engine")

WITHOUT_EFFECT_ON_WEIGHTS = frozenset({Kind.SAVE, Kind.SAVE_FOR_SAMPLER, Kind.SAVE_EXTERNAL, Kind.UNLOAD})


class Replay:
    """Restores runs into the memory of a lane. Called by jobs, on the lane's thread."""

    def __init__(self, store: Store, runs: TrainingRuns, savepoints: SavepointWriter) -> None:
        self._store = store
        self._runs = runs
        self._savepoints = savepoints
        self._excluded: set[str] = set()
        self._replaying: AbstractSet[str] = frozenset()

    def exclude(self, run_id: str) -> None:
        """Never replay a run again, also where others shared its passes: its replay crashes the worker."""
        self._excluded.add(run_id)

    def restore(self, run_id: str) -> Mapping[str, str]:
        """Restore a run, with all that shared passes with it; returns those that are corrupt, with the reason.

        Raises ``ModelUnavailable`` if its base model cannot be loaded. A :class:`WorkerLost` names the runs it was replaying.
        """
        members = self._store.journal.runs_sharing_turns([run_id])
        self._replaying = frozenset()
        try:
            corrupt = self._restore_all(members)
        except BaseException as error:
            # A partly restored run is worse than none: the next operation would build on wrong weights.
            for member in members:
                self._runs.forget(member)
            if isinstance(error, WorkerLost):
                error.replaying = self._replaying
            raise
        if run_id not in self._runs.live:
            corrupt.setdefault(run_id, "neither a savepoint of it nor its creation is on record")
        for member in members:
            row = self._store.runs.get(member)
            is_over = row is None or row.status is not RunStatus.LIVE
            if is_over or member in corrupt:
                self._runs.forget(member)
            if is_over:
                corrupt.pop(member, None)
        return corrupt

    def _restore_all(self, members: AbstractSet[str]) -> dict[str, str]:
        started = time.monotonic()
        corrupt = dict.fromkeys(members & self._excluded, "its replay crashes the worker every time")
        for member in sorted(members - self._excluded):
            self._read_savepoint(member, corrupt)
        entries = self._store.journal.turns(members)
        for _, turn in groupby(entries, key=attrgetter("turn")):
            self._repeat(list(turn), corrupt)
        logger.info(
            "restored %d runs and replayed %d operations in %.1f s",
            len(members),
            len(entries),
            time.monotonic() - started,
        )
        return corrupt

    def _read_savepoint(self, run_id: str, corrupt: dict[str, str]) -> None:
        savepoint, row = self._store.savepoints.get(run_id), self._store.runs.get(run_id)
        if savepoint is None or row is None:
            return  # its creation is in the journal
        model = self._runs.load_model(row.base_model)
        self._replaying = frozenset({run_id})
        try:
            self._runs.restore(model, savepoint)
        except CorruptState as error:
            corrupt[run_id] = str(error)

    def _repeat(self, turn: Sequence[TurnEntry], corrupt: dict[str, str]) -> None:
        entries: list[TurnEntry] = []
        operations: list[Operation] = []
        for entry in turn:
            if entry.run_id not in corrupt:
                try:
                    operations.append(self._read(entry))
                    entries.append(entry)
                except CorruptState as error:
                    corrupt[entry.run_id] = str(error)
        started = time.monotonic()
        self._replaying = frozenset(entry.run_id for entry in entries)
        if operations:
            self._run(operations, entries[0])
        self._savepoints.record_work({entry.run_id for entry in turn}, time.monotonic() - started)
        for entry, operation in zip(entries, operations, strict=True):
            if operation.outcome is not None:
                if operation.succeeded != entry.succeeded:
                    reason = f"its operation {entry.seq_id} ended differently when it was replayed"
                    corrupt[entry.run_id] = reason
                self._compare(operation, operation.outcome)

    def _read(self, entry: TurnEntry) -> Operation:
        row = self._store.journal.get(entry.request_id)
        if row is None or not row.intact:
            raise CorruptState(f"the journal of its operation {entry.seq_id} is corrupt")
        try:
            kind = Kind(row.kind)
            request = decode_request(kind, row.body)
        except ValueError as error:
            raise CorruptState(
                f"the journal of its operation {entry.seq_id} cannot be read ({error})"
            ) from error
        return Operation(row.request_id, row.owner, "", row.run_id, row.seq_id, kind, row.num_tokens, request)

    def _run(self, operations: Sequence[Operation], first: TurnEntry) -> None:
        """Run the operations of a turn, unless they had no effect on the weights; those that ran have an outcome."""
        kind = operations[0].kind
        if kind.packs:
            # Passes without a backward part have no effect.
            if any(operation.kind is Kind.FORWARD_BACKWARD for operation in operations):
                cut = first.num_shards, first.shard_threads
                ended = self._runs.run_pass(operations, prefix_sharing=first.prefix_sharing, cut=cut)
                while not ended:
                    ended = self._runs.resume_pass()
                return
        elif kind is Kind.OPTIM_STEP:
            for error in self._runs.run_steps(operations).values():
                raise error
            return
        elif first.succeeded and kind not in WITHOUT_EFFECT_ON_WEIGHTS:
            self._runs.run_barrier(operations[0])  # its changes were committed when it first ran
            return
        for operation in operations:
            run = self._runs.live.get(operation.run_id)
            if run is not None:
                run.next_seq = operation.seq_id + 1

    def _compare(self, operation: Operation, outcome: Outcome) -> None:
        committed = self._store.futures.outcome(operation.request_id)
        if (
            committed is not None
            and committed.status is FutureStatus.DONE
            and not same_result(committed, outcome)
        ):
            logger.warning(
                "operation %d of run %s gave other digits when it was replayed; was the number of threads, the version of torch "
                "or max_tokens_per_pass changed, or is a run corrupt that shared its passes?",
                operation.seq_id,
                operation.run_id,
            )


@dataclass
class TurnResult:
    """What a turn changed in the records; its operations have their outcomes, unless it failed as a whole."""

    changes: Sequence[Change] = ()
    error: Exception | None = None
    unrecoverable: Mapping[str, str] = field(default_factory=dict)
    """Runs that could not be restored, with the reason."""


@dataclass(eq=False)
class TrainingJob:
    """Training turns: their runs are restored into memory, then each runs its operations."""

    turns: Sequence[Turn]
    number: int
    """The number of the first turn in the journal; the others follow."""
    runs: TrainingRuns
    replay: Replay
    savepoints: SavepointWriter
    eviction: Eviction
    prefix_sharing: bool
    """Whether the datums of a pass share their prefixes."""
    position: int = 0
    """Which turn is running."""
    is_suspended: bool = False
    """Whether it was reported before its pass had ended, because something else waits for the lane; it is dispatched again."""
    seconds: float = 0.0
    """How long its pass has run before it was suspended."""

    def run(self, lane: Lane) -> Sequence[TurnResult]:
        """Run the turns, and set the outcomes of their operations; an operation's own error is its outcome.

        If it is suspended nothing has happened yet, and the result is empty.
        """
        results: list[TurnResult] = []
        corrupt: dict[str, str] = {}
        failures = self._restore_runs(corrupt) if not self.is_suspended else {}
        if self.turns[0][0].kind is Kind.OPTIM_STEP:
            results = self._run_steps(failures)
            results[0].unrecoverable = corrupt
            return results
        for position, turn in enumerate(self.turns):
            self.position = position
            try:
                for operation in turn:
                    if operation.run_id in failures:
                        raise failures[operation.run_id]
                result = self._run_turn(turn, self.number + position, lane)
                if result is None:
                    return ()
                results.append(result)
            except WorkerLost:
                raise
            except Exception as error:  # noqa: BLE001 -- the loop fails its operations with it
                results.append(TurnResult(error=error))
        results[0].unrecoverable = corrupt
        return results

    def _run_steps(self, failures: Mapping[str, Exception]) -> list[TurnResult]:
        """Run turns that are one optimizer step each."""
        started = time.monotonic()
        steps = [step for (step,) in self.turns if step.run_id not in failures]
        try:
            failures = {**failures, **self.runs.run_steps(steps)}
        except WorkerLost:
            running = next(step for step in steps if step.outcome is None)  # they run in order
            self.position = next(n for n, (step,) in enumerate(self.turns) if step is running)
            raise
        seconds = (time.monotonic() - started) / len(self.turns)
        for step in steps:
            self.savepoints.record_work({step.run_id}, seconds)
        return [TurnResult(error=failures.get(step.run_id)) for (step,) in self.turns]

    def _restore_runs(self, corrupt: dict[str, str]) -> Mapping[str, Exception]:
        """Restore the runs that are not in memory, before the first turn: a replay repeats committed turns only, also of others.

        Returns the runs that cannot be restored now, with the error.
        """
        operations = [operation for turn in self.turns for operation in turn]
        failures: dict[str, Exception] = {}
        try:
            self.eviction.make_room(operations, self.number - 1)
        except WorkerLost:
            raise
        except Exception as error:  # noqa: BLE001 -- as above
            return {operation.run_id: error for operation in operations}
        for operation in operations:
            run_id = operation.run_id
            if run_id in self.runs.live or run_id in failures or run_id in corrupt:
                continue
            try:
                if operation.seq_id > 0:
                    corrupt |= self.replay.restore(run_id)
                else:
                    self.eviction.check_fits(operation)
            except WorkerLost:
                raise
            except Exception as error:  # noqa: BLE001 -- as above
                failures[run_id] = error
        return failures

    def _run_turn(self, turn: Turn, number: int, lane: Lane) -> TurnResult | None:
        first = turn[0]
        started = time.monotonic() - self.seconds
        changes: list[Change] = []
        if first.kind.packs:
            was_suspended, self.is_suspended = self.is_suspended, False
            if was_suspended:
                ended = self.runs.resume_pass()
            else:
                ended = self.runs.run_pass(turn, prefix_sharing=self.prefix_sharing)
            while not ended and not lane.is_wanted:
                ended = self.runs.resume_pass()
            if not ended:
                self.is_suspended, self.seconds = True, time.monotonic() - started
                return None
        else:
            changes = self.runs.run_barrier(first)
        trained = any(operation.kind.trains for operation in turn)
        seconds = time.monotonic() - started if trained else 0.0
        self.savepoints.record_work({operation.run_id for operation in turn}, seconds)
        if first.kind is Kind.LOAD and first.succeeded:
            # The checkpoint may be deleted or replaced before a replay would read it again.
            written = self.savepoints.write_now(first.run_id, number)
            if written is not None:
                changes.append(written)
        return TurnResult(changes)


def same_result(one: Outcome, other: Outcome) -> bool:
    """Whether two results are equal to the last bit; protobuf may encode the same one in different orders."""
    if one == other or ResultFormat.PROTO not in (one.format, other.format):
        return one == other
    left, right = (wire_proto.decode_forward_backward_output(outcome.result) for outcome in (one, other))
    return left.metrics == right.metrics and all(
        mine.keys() == theirs.keys()
        and all(mine[name].array.tobytes() == theirs[name].array.tobytes() for name in mine)
        for mine, theirs in zip(left.loss_fn_outputs, right.loss_fn_outputs, strict=True)
    )
