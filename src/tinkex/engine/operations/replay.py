"""Bringing runs back into memory: the last savepoint, then the journal since it, turn by turn.

The turns are repeated as they were, with the same operations in the same passes, so the weights come out the same to the
last bit. Results were recorded then and stay as they are; nothing is saved or announced a second time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby
from operator import attrgetter

from tinkex._wire import proto as wire_proto
from tinkex.engine.backend.seam import Damaged
from tinkex.engine.operations.backlog import Operation
from tinkex.engine.operations.bodies import decode_operation
from tinkex.engine.operations.execution import Ended, Operations
from tinkex.engine.operations.savepoints import SavepointKeeper
from tinkex.engine.scheduler import Kind, Work
from tinkex.engine.store import FutureStatus, Outcome, ResultFormat, RunStatus, Store, TurnEntry

logger = logging.getLogger("tinkex.engine")

WITHOUT_EFFECT_ON_WEIGHTS = frozenset({Kind.SAVE, Kind.SAVE_FOR_SAMPLER, Kind.SAVE_EXTERNAL, Kind.UNLOAD})


class Replay:
    """Restores runs that an earlier engine left. Belongs to the engine thread."""

    def __init__(self, store: Store, operations: Operations, keeper: SavepointKeeper) -> None:
        self._store = store
        self._operations = operations
        self._keeper = keeper
        self._left_out: set[str] = set()
        self.under_way: AbstractSet[str] = frozenset()
        """The runs that are being restored or repeated at this moment: who is to blame if the worker dies."""

    def leave_out(self, run_id: str) -> None:
        """Repeat nothing of a run any more, also where others shared its passes: it ends the worker."""
        self._left_out.add(run_id)

    def revive(self, run_id: str) -> dict[str, str]:
        """Bring a run back, with all that shared passes with it; returns those that are damaged, with the reason.

        Raises ``ModelUnavailable`` if its base model cannot be loaded.
        """
        members = self._store.journal.entangled([run_id])
        try:
            damaged = self._revive(members)
        except BaseException:
            # Half-way back is worse than not back: the next operation would build on wrong weights.
            for member in members:
                self._operations.forget(member)
            raise
        if run_id not in self._operations.live:
            damaged.setdefault(run_id, "neither a savepoint of it nor its creation is on record")
        for member in members:
            row = self._store.runs.get(member)
            over = row is None or row.status is not RunStatus.LIVE
            if over or member in damaged:
                self._operations.forget(member)
            if over:
                damaged.pop(member, None)
        return damaged

    def _revive(self, members: AbstractSet[str]) -> dict[str, str]:
        started = time.monotonic()
        damaged = dict.fromkeys(members & self._left_out, "its replay ends the worker every time")
        self.under_way = frozenset()
        for member in sorted(members - self._left_out):
            self._restore(member, damaged)
        entries = self._store.journal.turns(members)
        for _, turn in groupby(entries, key=attrgetter("turn")):
            self._repeat(list(turn), damaged)
        logger.info(
            "restored %d runs and repeated %d operations in %.1f s",
            len(members),
            len(entries),
            time.monotonic() - started,
        )
        return damaged

    def _restore(self, run_id: str, damaged: dict[str, str]) -> None:
        savepoint, row = self._store.savepoints.get(run_id), self._store.runs.get(run_id)
        if savepoint is None or row is None:
            return  # its creation is in the journal
        base = self._operations.ready_base(row.base_model)
        self.under_way = frozenset({run_id})
        try:
            self._operations.restore(run_id, base, savepoint)
        except Damaged as damage:
            damaged[run_id] = str(damage)

    def _repeat(self, turn: Sequence[TurnEntry], damaged: dict[str, str]) -> None:
        pairs: list[tuple[TurnEntry, Work[Operation]]] = []
        for entry in turn:
            if entry.run_id in damaged:
                continue
            try:
                pairs.append((entry, self._read(entry)))
            except Damaged as damage:
                damaged[entry.run_id] = str(damage)
        started = time.monotonic()
        self.under_way = frozenset(entry.run_id for entry, _ in pairs)
        ended = self._run(pairs)
        self._keeper.worked({entry.run_id for entry in turn}, time.monotonic() - started)
        entries = {entry.request_id: entry for entry in turn}
        for each in ended:
            if (each.outcome.status is FutureStatus.DONE) != entries[each.work.request_id].succeeded:
                damaged[each.work.run_id] = (
                    f"its operation {each.work.seq_id} ended differently when it was repeated"
                )
            self._compare(each)

    def _read(self, entry: TurnEntry) -> Work[Operation]:
        row = self._store.journal.get(entry.request_id)
        if row is None or not row.intact:
            raise Damaged(f"the journal of its operation {entry.seq_id} is damaged")
        try:
            kind = Kind(row.kind)
            request = decode_operation(kind, row.body)
        except ValueError as error:
            raise Damaged(f"the journal of its operation {entry.seq_id} cannot be read ({error})") from error
        return Work(row.request_id, row.owner, "", row.run_id, row.seq_id, kind, row.num_tokens, request)

    def _run(self, pairs: Sequence[tuple[TurnEntry, Work[Operation]]]) -> Sequence[Ended]:
        works = [work for _, work in pairs]
        if not works:
            return ()
        if works[0].kind.packs:
            # Passes without a backward part leave nothing behind.
            if any(work.kind is Kind.FORWARD_BACKWARD for work in works):
                return self._operations.run_pass(works)
        else:
            (entry, work), *_ = pairs
            changed = entry.succeeded or work.kind is Kind.OPTIM_STEP
            if changed and work.kind not in WITHOUT_EFFECT_ON_WEIGHTS:
                ended = self._operations.run_alone(work)
                self._operations.take_effects()  # recorded when it ran for the first time
                return (ended,)
        for work in works:
            run = self._operations.live.get(work.run_id)
            if run is not None:
                run.next_seq = work.seq_id + 1
        return ()

    def _compare(self, ended: Ended) -> None:
        told = self._store.futures.outcome(ended.work.request_id)
        if told is not None and told.status is FutureStatus.DONE and not _same(told, ended.outcome):
            logger.warning(
                "operation %d of run %s gave other digits when it was repeated; was the number of threads, the version of torch "
                "or max_tokens_per_pass changed, or is a run damaged that shared its passes?",
                ended.work.seq_id,
                ended.work.run_id,
            )


def _same(one: Outcome, other: Outcome) -> bool:
    """Whether two results are equal to the last bit; protobuf may write the same one in different orders."""
    if one == other or ResultFormat.PROTO not in (one.format, other.format):
        return one == other
    left, right = (wire_proto.decode_forward_backward_output(outcome.result) for outcome in (one, other))
    return left.metrics == right.metrics and all(
        mine.keys() == theirs.keys()
        and all(mine[name].array.tobytes() == theirs[name].array.tobytes() for name in mine)
        for mine, theirs in zip(left.loss_fn_outputs, right.loss_fn_outputs, strict=True)
    )
