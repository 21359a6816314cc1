"""Placement: which trainer holds each run. All operations of a run go there."""

from __future__ import annotations

import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet

from tinkex.engine.store import Store

logger = logging.getLogger("tinkex.engine")

BUSY_WEIGHT = 1_000_000


class Placement:
    """Pins runs to trainers, least loaded first; the pins are recorded. Only called on the engine thread.

    Runs that shared a pass since their savepoints are replayed together, so they are pinned to the same trainer.
    ``unfinished_runs`` returns the runs with operations that have not ended.
    """

    def __init__(
        self, store: Store, lanes: Sequence[str], unfinished_runs: Callable[[], AbstractSet[str]]
    ) -> None:
        self._store = store
        self._lanes = lanes
        self._unfinished_runs = unfinished_runs
        self._pins: dict[str, str] = {}
        self._runs: dict[str, set[str]] = {lane: set() for lane in lanes}
        self._unplaced: dict[str, None] = {}
        """Runs to pin; those that could not be looked up are tried again."""

    @property
    def has_choice(self) -> bool:
        """Whether there are several trainers."""
        return len(self._lanes) > 1

    def lane_of(self, run_id: str) -> str:
        """The trainer of a run; the first one if it has none yet."""
        if not self.has_choice:
            return self._lanes[0]
        pin = self._pins.get(run_id)
        if pin is None:
            row = self._store.runs.get(run_id)
            pin = row.lane if row is not None else None
        return pin if pin is not None and pin in self._lanes else self._lanes[0]

    def place(self, run_ids: Iterable[str], available: Collection[str]) -> None:
        """Pin those of the runs that are not pinned, if possible to a trainer that is ``available``."""
        self._unplaced.update((run_id, None) for run_id in run_ids if run_id not in self._pins)
        if not self._unplaced:
            return
        unfinished = self._unfinished_runs()
        # Runs with operations count most; of equally busy trainers the one with fewer runs is chosen.
        load = Counter(
            {lane: len(runs) + BUSY_WEIGHT * len(runs & unfinished) for lane, runs in self._runs.items()}
        )
        for run_id in list(self._unplaced):
            if run_id in self._pins:  # with one that shared a pass with it
                del self._unplaced[run_id]
                continue
            members = self._store.journal.runs_sharing_turns([run_id])
            lane = self._choose(members, load, available)
            for member in members:
                self._pin(member, lane)
            del self._unplaced[run_id]
            load[lane] += len(members) + BUSY_WEIGHT * len(members & unfinished)
            self._record(members, lane)

    def runs_on(self, lane: str) -> AbstractSet[str]:
        """The runs that are pinned to a trainer; it changes with them."""
        return self._runs[lane]

    def release(self, lane: str, keep: AbstractSet[str]) -> None:
        """Have the runs of a trainer that was lost placed again, except those to ``keep``.

        Those are of interrupted turns, which run again as they were, and may be what crashed it.
        """
        for run_id in self._runs.get(lane, set()) - keep:
            self._unpin(run_id)

    def forget(self, run_id: str) -> None:
        """Forget a run that has ended."""
        self._unplaced.pop(run_id, None)
        self._unpin(run_id)

    def _unpin(self, run_id: str) -> None:
        lane = self._pins.pop(run_id, None)
        if lane is not None:
            self._runs[lane].discard(run_id)

    def _pin(self, run_id: str, lane: str) -> None:
        self._unpin(run_id)
        self._pins[run_id] = lane
        self._runs[lane].add(run_id)

    def _choose(self, members: AbstractSet[str], load: Counter[str], available: Collection[str]) -> str:
        pinned = next((pin for member in members if (pin := self._pins.get(member)) is not None), None)
        if pinned is not None:
            return pinned
        recorded = next(
            (
                row.lane
                for member in members
                if (row := self._store.runs.get(member)) is not None and row.lane
            ),
            None,
        )
        if recorded is not None and recorded in available:
            return recorded
        candidates = [lane for lane in self._lanes if lane in available] or self._lanes
        return min(candidates, key=load.__getitem__)

    def _record(self, members: AbstractSet[str], lane: str) -> None:
        moved = [
            member
            for member in members
            if (row := self._store.runs.get(member)) is not None and row.lane != lane
        ]
        if moved:
            try:
                self._store.runs.set_lane(moved, lane)
            except sqlite3.Error as error:  # after a restart they are placed again, which is correct too
                logger.warning("the trainer of %d runs cannot be recorded: %s", len(moved), error)
