"""Who follows a run: readers on event loops are woken when metrics or rollouts of it are committed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable, Iterator

from tinkex.engine.loop_signal import LoopSignal


class Follower(LoopSignal):
    """Wakes one reader, on the event loop that it was made on."""

    def __init__(self, run_ids: Collection[str] | None) -> None:
        super().__init__()
        self.run_ids = None if run_ids is None else frozenset(run_ids)
        """The runs it follows; None follows all."""


class RunChanges:
    """The readers that follow runs. Any event loop may follow, and any thread may notify.

    Example:
        >>> with store.run_changes.follow([run_id]) as follower:
        ...     while True:
        ...         await follower.changed()
        ...         points = store.loop_metrics.new_values(run_id, seen)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followers: set[Follower] = set()

    @contextlib.contextmanager
    def follow(self, run_ids: Collection[str] | None = None) -> Iterator[Follower]:
        """Follow some runs, or all; on the running event loop."""
        follower = Follower(run_ids)
        with self._lock:
            self._followers.add(follower)
        try:
            yield follower
        finally:
            with self._lock:
                self._followers.discard(follower)

    def notify(self, run_ids: Iterable[str]) -> None:
        """Wake those who follow one of these runs; call it when what changed is committed."""
        if not self._followers:  # a follower that is being added reads afterwards
            return
        changed = set(run_ids)
        with self._lock:
            woken = [each for each in self._followers if each.run_ids is None or each.run_ids & changed]
        for follower in woken:
            follower.notify()
