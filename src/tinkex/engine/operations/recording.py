"""Writing down what happened, before anyone is told.

The outcome of an operation, the turn it ran in and everything it did to the records (a checkpoint that now exists, a run that is
over) go into one commit. So after a crash an operation has either happened entirely, or it runs again from the start.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tinkex.engine.operations.health import Health
from tinkex.engine.operations.outcomes import failed
from tinkex.engine.store import Outcome, Store, Timing, TurnEntry
from tinkex.errors import EngineFailure

logger = logging.getLogger("tinkex.engine")

Effect: TypeAlias = Callable[[], Callable[[], None] | None]
"""A change of the records, made inside the commit; what it returns is done after it."""

RESULTS = "results"


@dataclass(frozen=True)
class Event:
    """What is recorded together: outcomes, the turn of those that ran, those that never did, and effects."""

    outcomes: Sequence[tuple[str, Outcome]]
    entries: Sequence[TurnEntry] = ()
    never_ran: Sequence[str] = ()
    effects: Sequence[Effect] = ()
    timings: Mapping[str, Timing] = field(default_factory=dict)
    """When each of them ran, and what it cost."""


class Recorder:
    """Records events in order; what cannot be recorded waits. Belongs to the engine thread."""

    def __init__(self, store: Store, health: Health) -> None:
        self._store = store
        self._health = health
        self._waiting: list[Event] = []
        self.turn = store.journal.last_turn()
        """The last turn that has run."""

    @property
    def behind(self) -> bool:
        """Whether something has happened that is not recorded; until it is, nothing else may run."""
        return bool(self._waiting)

    def record(self, event: Event) -> Sequence[tuple[str, Outcome]]:
        """Record an event; returns the outcomes that may be told now."""
        self._waiting.append(event)
        return self.catch_up()

    def catch_up(self) -> Sequence[tuple[str, Outcome]]:
        """Record what waits; returns the outcomes that may be told now."""
        told: list[tuple[str, Outcome]] = []
        while self._waiting:
            event = self._waiting[0]
            try:
                afterwards = self._commit(event)
            except sqlite3.IntegrityError as error:
                if not event.effects:
                    raise
                logger.exception("the records contradict what an operation did")
                failure = failed(EngineFailure(f"the operation could not be recorded: {error}"))
                outcomes = [(request_id, failure) for request_id, _ in event.outcomes]
                self._waiting[0] = replace(event, outcomes=outcomes, effects=())
                continue
            except sqlite3.Error as error:
                logger.warning("results cannot be recorded, and wait: %s", error)
                self._health.trouble(RESULTS, f"results cannot be recorded ({error})")
                return told
            self._waiting.pop(0)
            for action in afterwards:
                action()
            told += event.outcomes
        self._health.fine(RESULTS)
        return told

    def _commit(self, event: Event) -> Sequence[Callable[[], None]]:
        with self._store.database.transaction():
            now = time.time()
            self._store.finished.add(event.outcomes, event.timings, now)
            self._store.futures.finish(event.outcomes, now)
            self._store.journal.executed(event.entries)
            self._store.journal.never_ran(event.never_ran)
            return [action for effect in event.effects if (action := effect()) is not None]
