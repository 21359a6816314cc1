"""Commits: the outcome of an operation is on disk before anyone learns of it.

The outcomes of a turn, the turn itself and everything it changed in the records (a checkpoint that now exists, a run that is
over, what was used) go into one transaction. So after a crash an operation has either happened entirely, or runs again.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tinkex.engine.encoding import failed
from tinkex.engine.health import Health
from tinkex.engine.operation import Kind, Operation
from tinkex.engine.store import (
    HOUR_S,
    Store,
    Timing,
    TurnEntry,
    UsageKey,
    UsageKind,
)
from tinkex.engine.store.changes import Change, Obsolete, apply
from tinkex.errors import EngineFailure

logger = logging.getLogger("tinkex.engine")

SUBJECT = "results"


@dataclass
class Commit:
    """What is committed together: computed operations, the turn of those that ran, and changes of the records."""

    operations: Sequence[Operation]
    turn: int = 0
    changes: Sequence[Change] = ()
    obsolete: Sequence[Obsolete] = ()
    """Files that nothing refers to any more once it is committed."""


class Committer:
    """Commits in order; a commit that fails is kept and tried again. Only called on the engine thread."""

    def __init__(self, store: Store, health: Health) -> None:
        self._store = store
        self._health = health
        self.waiting: list[Commit] = []
        """Outcomes that are not committed; until they are, nothing else may run."""
        self.turn = store.journal.last_turn()
        """The number of the last turn."""
        self.usage_totals: Mapping[UsageKind, int] = dict.fromkeys(UsageKind, 0)
        """What all users used since the engine started; replaced, never changed, so any thread may read it."""

    def commit(self, *commits: Commit) -> Sequence[Commit]:
        """Commit what waits, then ``commits``, in one transaction if they can be; returns what is committed now."""
        self.waiting += commits
        done: list[Commit] = []
        alone = False
        while self.waiting:
            batch = self.waiting[:1] if alone else list(self.waiting)
            try:
                with self._store.database.transaction():
                    for commit in batch:
                        commit.obsolete = self._write(commit)
            except sqlite3.IntegrityError as error:
                if len(batch) > 1:
                    alone = True  # it concerns one of them
                    continue
                if not batch[0].changes:
                    raise
                logger.exception("the records contradict what an operation did")
                for operation in batch[0].operations:
                    operation.outcome = failed(EngineFailure(f"the operation could not be recorded: {error}"))
                    operation.usage = {}
                batch[0].changes = ()
                continue
            except sqlite3.Error as error:
                logger.warning("results cannot be committed; retrying: %s", error)
                self._health.trouble(SUBJECT, f"results cannot be recorded ({error})")
                return done
            totals = Counter(self.usage_totals)
            for operation in (operation for commit in batch for operation in commit.operations):
                totals.update(operation.usage)
            self.usage_totals = dict(totals)
            self._store.run_changes.notify(
                operation.run_id
                for commit in batch
                for operation in commit.operations
                if operation.kind is Kind.OPTIM_STEP
            )
            done += batch
            del self.waiting[: len(batch)]
        if done:
            self._health.fine(SUBJECT)
        return done

    def _write(self, commit: Commit) -> Sequence[Obsolete]:
        """Write a commit inside the caller's transaction; returns the files that become unreferenced."""
        operations = commit.operations
        outcomes = [(each.request_id, each.outcome) for each in operations if each.outcome is not None]
        assert len(outcomes) == len(operations), "a computed operation has an outcome"
        timings = {
            each.request_id: Timing(each.started_at, each.num_tokens, each.tokens_computed)
            for each in operations
        }
        now = time.time()
        self._store.finished.add(outcomes, timings, now)
        self._store.futures.finish(outcomes, now)
        self._store.journal.add_turns(
            [
                TurnEntry(
                    commit.turn,
                    place,
                    op.run_id,
                    op.seq_id,
                    op.request_id,
                    op.succeeded,
                    prefix_sharing=op.prefix_sharing,
                    num_shards=op.num_shards,
                    shard_threads=op.shard_threads,
                )
                for place, op in enumerate(operations)
                if op.ran  # a replay repeats it
            ]
        )
        self._store.journal.drop_unrun(
            each.request_id for each in operations if not each.ran and each.kind is not Kind.SAMPLE
        )
        events = [each.loop_event for each in operations if each.loop_event is not None]
        if events:
            self._store.loop_metrics.record(events, now)
        usage = self._usage(operations)
        if usage:
            self._store.usage.add(usage)
        return [apply(self._store, change) for change in commit.changes]

    def _usage(self, operations: Iterable[Operation]) -> Mapping[UsageKey, int]:
        amounts: Counter[UsageKey] = Counter()
        for operation in operations:
            if not operation.usage:
                continue
            named = (
                self._store.samplers.get(operation.run_id)
                if operation.kind is Kind.SAMPLE
                else self._store.runs.get(operation.run_id)
            )
            if named is not None:
                session_id, base_model = named.session_id, named.base_model
            else:
                session_id, base_model = "", getattr(operation.request, "base_model", None) or ""
            hour = int(time.time()) // HOUR_S * HOUR_S
            for kind, amount in operation.usage.items():
                if amount > 0:
                    amounts[UsageKey(hour, operation.owner, session_id, base_model, kind)] += amount
        return amounts
