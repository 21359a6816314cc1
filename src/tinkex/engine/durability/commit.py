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
from dataclasses import dataclass, replace

from tinkex.engine.encoding import failed
from tinkex.engine.health import Health
from tinkex.engine.operation import Kind, Operation
from tinkex.engine.store import (
    HOUR_S,
    FutureStatus,
    Outcome,
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


@dataclass(frozen=True)
class Commit:
    """What is committed together: computed operations, the turn of those that ran, and changes of the records."""

    operations: Sequence[Operation]
    turn: int = 0
    changes: Sequence[Change] = ()


@dataclass(frozen=True)
class Committed:
    """A commit that succeeded, and the files that nothing refers to any more."""

    operations: Sequence[Operation]
    obsolete: Sequence[Obsolete]


class Committer:
    """Commits in order; a commit that fails is kept and tried again. Only called on the engine thread."""

    def __init__(self, store: Store, health: Health) -> None:
        self._store = store
        self._health = health
        self._waiting: list[Commit] = []
        self.turn = store.journal.last_turn()
        """The number of the last turn."""
        self.usage_totals: Mapping[UsageKind, int] = dict.fromkeys(UsageKind, 0)
        """What all users used since the engine started; replaced, never changed, so any thread may read it."""

    @property
    def is_behind(self) -> bool:
        """Whether an outcome is not committed; until it is, nothing else may run."""
        return bool(self._waiting)

    def commit(self, commit: Commit) -> Sequence[Committed]:
        """Commit, after everything that waits; returns what is committed now."""
        self._waiting.append(commit)
        return self.retry()

    def retry(self) -> Sequence[Committed]:
        """Commit what waits; returns what is committed now."""
        done: list[Committed] = []
        while self._waiting:
            commit = self._waiting[0]
            try:
                obsolete = self._write(commit)
            except sqlite3.IntegrityError as error:
                if not commit.changes:
                    raise
                logger.exception("the records contradict what an operation did")
                for operation in commit.operations:
                    operation.outcome = failed(EngineFailure(f"the operation could not be recorded: {error}"))
                    operation.usage = {}
                self._waiting[0] = replace(commit, changes=())
                continue
            except sqlite3.Error as error:
                logger.warning("results cannot be committed; retrying: %s", error)
                self._health.trouble(SUBJECT, f"results cannot be recorded ({error})")
                return done
            self._waiting.pop(0)
            self._count(commit.operations)
            done.append(Committed(commit.operations, obsolete))
        self._health.fine(SUBJECT)
        return done

    def _write(self, commit: Commit) -> Sequence[Obsolete]:
        operations = commit.operations
        outcomes = [(operation.request_id, _outcome(operation)) for operation in operations]
        timings = {each.request_id: Timing(each.started_at, each.num_tokens) for each in operations}
        with self._store.database.transaction():
            now = time.time()
            self._store.finished.add(outcomes, timings, now)
            self._store.futures.finish(outcomes, now)
            self._store.journal.add_turns(_entries(commit))
            self._store.journal.drop_unrun(
                each.request_id for each in operations if not each.ran and each.kind is not Kind.SAMPLE
            )
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

    def _count(self, operations: Iterable[Operation]) -> None:
        totals = Counter(self.usage_totals)
        for operation in operations:
            totals.update(operation.usage)
        self.usage_totals = dict(totals)


def _entries(commit: Commit) -> Sequence[TurnEntry]:
    """The operations of the turn that a replay repeats, in their order."""
    return [
        TurnEntry(
            commit.turn, place, op.run_id, op.seq_id, op.request_id, _outcome(op).status is FutureStatus.DONE
        )
        for place, op in enumerate(commit.operations)
        if op.ran
    ]


def _outcome(operation: Operation) -> Outcome:
    assert operation.outcome is not None, "a computed operation has an outcome"
    return operation.outcome
