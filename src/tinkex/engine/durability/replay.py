"""Replay: a run is restored from its last savepoint and the journal since it, turn by turn.

The turns are repeated as they were, with the same operations in the same passes, so the weights are the same to the
last bit. Results were committed then and stay as they are; nothing is saved or reported a second time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from tinkex._wire import proto as wire_proto
from tinkex.engine.durability.savepoints import SavepointWriter
from tinkex.engine.encoding import decode_request
from tinkex.engine.lanes.interface import CorruptState, WorkerLost
from tinkex.engine.lanes.lane import Lane
from tinkex.engine.operation import Kind, Operation
from tinkex.engine.running.training import Result, TrainingRuns, TurnResult
from tinkex.engine.scheduler import Turn
from tinkex.engine.store import FutureStatus, Outcome, ResultFormat, RunStatus, Store, TurnEntry

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
            self._runs.restore(run_id, model, savepoint)
        except CorruptState as error:
            corrupt[run_id] = str(error)

    def _repeat(self, turn: Sequence[TurnEntry], corrupt: dict[str, str]) -> None:
        pairs: list[tuple[TurnEntry, Operation]] = []
        for entry in turn:
            if entry.run_id in corrupt:
                continue
            try:
                pairs.append((entry, self._read(entry)))
            except CorruptState as error:
                corrupt[entry.run_id] = str(error)
        started = time.monotonic()
        self._replaying = frozenset(entry.run_id for entry, _ in pairs)
        results = self._run(pairs)
        self._savepoints.record_work({entry.run_id for entry in turn}, time.monotonic() - started)
        entries = {entry.request_id: entry for entry in turn}
        for result in results:
            operation = result.operation
            if result.succeeded != entries[operation.request_id].succeeded:
                corrupt[operation.run_id] = (
                    f"its operation {operation.seq_id} ended differently when it was replayed"
                )
            self._compare(result)

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

    def _run(self, pairs: Sequence[tuple[TurnEntry, Operation]]) -> Sequence[Result]:
        operations = [operation for _, operation in pairs]
        if not operations:
            return ()
        if operations[0].kind.packs:
            # Passes without a backward part have no effect.
            if any(operation.kind is Kind.FORWARD_BACKWARD for operation in operations):
                return self._runs.run_pass(operations).results
        else:
            (entry, operation), *_ = pairs
            changed = entry.succeeded or operation.kind is Kind.OPTIM_STEP
            if changed and operation.kind not in WITHOUT_EFFECT_ON_WEIGHTS:
                return self._runs.run_barrier(
                    operation
                ).results  # its changes were committed when it first ran
        for operation in operations:
            run = self._runs.live.get(operation.run_id)
            if run is not None:
                run.next_seq = operation.seq_id + 1
        return ()

    def _compare(self, result: Result) -> None:
        committed = self._store.futures.outcome(result.operation.request_id)
        if (
            committed is not None
            and committed.status is FutureStatus.DONE
            and not same_result(committed, result.outcome)
        ):
            logger.warning(
                "operation %d of run %s gave other digits when it was replayed; was the number of threads, the version of torch "
                "or max_tokens_per_pass changed, or is a run corrupt that shared its passes?",
                result.operation.seq_id,
                result.operation.run_id,
            )


@dataclass(frozen=True, eq=False)
class TrainingJob:
    """A training turn: restores the runs that are not in memory, then runs the operations."""

    turn: Turn
    number: int
    """The number of the turn in the journal."""
    runs: TrainingRuns
    replay: Replay
    savepoints: SavepointWriter

    def run(self, lane: Lane) -> TurnResult:
        """Run the turn; an operation's own error is its outcome."""
        del lane  # the runs have their backend
        operations = self.turn.operations
        corrupt: dict[str, str] = {}
        for operation in operations:
            if operation.seq_id > 0 and operation.run_id not in self.runs.live:
                corrupt |= self.replay.restore(operation.run_id)
        started = time.monotonic()
        result = self.runs.run_pass(operations) if self.turn.is_pass else self.runs.run_barrier(operations[0])
        trained = any(operation.kind.trains for operation in operations)
        seconds = time.monotonic() - started if trained else 0.0
        self.savepoints.record_work({operation.run_id for operation in operations}, seconds)
        result.unrecoverable = corrupt
        first = result.results[0]
        if first.operation.kind is Kind.LOAD and first.succeeded:
            # The checkpoint may be deleted or replaced before a replay would read it again.
            written = self.savepoints.write_now(first.operation.run_id, self.number)
            if written is not None:
                result.changes.append(written)
        return result


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
