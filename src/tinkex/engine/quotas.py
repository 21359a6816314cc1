"""Quotas of users: how many runs each may have, and how many bytes each may store.

What exceeds a quota is rejected with an error that says how to free some; other users are not affected. Everything that a user
causes on disk counts: files, and rows of the database.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from tinkex.engine.config import EngineConfig
from tinkex.engine.store import Store
from tinkex.errors import Busy, InvalidInput, NoRoom, OverQuota

CROWDED = 0.9
"""The part of a quota above which results, snapshots and ended sessions are deleted sooner."""

REMEDIES: Mapping[str, str] = {
    "checkpoints": "delete checkpoints, or set a TTL on them",
    "images": "delete images, or upload them with a TTL",
    "uploads": "finish or cancel uploads of weights",
    "snapshots": "save sampler weights less often: unnamed snapshots are deleted when newer ones exist and they are not used",
    "savepoints": "unload runs that are not needed",
    "journal": "wait until operations that were sent have run and are part of a savepoint",
    "results": "fetch results and wait: they are deleted soon after that",
    "sessions": "finish sessions and wait: what is left of them is deleted soon after that",
    "metrics": "log fewer metrics, and delete the checkpoints of old runs: their metrics are deleted with them",
    "rollouts": "report rollouts of fewer steps, and delete the checkpoints of old runs: their rollouts are deleted with them",
    "logs": "ask the server's operator to keep its logs for a shorter time",
}
"""What a user can do to free space, by the kind that takes the most."""


class Quotas:
    """Rejects what exceeds a user's quota or the server's limit. Safe on any thread."""

    def __init__(self, config: EngineConfig, store: Store) -> None:
        self._config = config
        self._store = store

    def check_new_run(self, owner: str) -> None:
        """Raise if a user may not have one more run.

        Runs of sessions that finished or are silent do not count: programs that exit leave them behind.
        """
        own = self._config.max_live_runs_per_user
        if own is None:
            return
        if self._store.runs.count_in_use(owner, time.time() - self._config.session_silent_s) >= own:
            raise OverQuota(
                f"{own} runs of yours are in use, which is a user's quota; close sessions that are done, or unload runs "
                "that are not needed."
            )

    def check_run_size(self, num_bytes: int) -> None:
        """Raise ``InvalidInput`` for a run that does not fit into the memory of runs, however many are evicted."""
        limit = self._config.live_bytes_limit
        if num_bytes > limit:
            raise InvalidInput(
                f"this run would take {num_bytes} bytes of memory, and all runs of this server may take {limit}; use a lower rank, "
                "train fewer modules, or have its operator raise max_live_bytes."
            )

    def check_room(self, owner: str, num_bytes: int = 0) -> None:
        """Raise if a user may not store so many more bytes, or nothing more at all.

        Called when a request is accepted that will store something, and again when files of a known size are written.
        """
        problem = _problem(self._config, self._store, owner, max(num_bytes, 1))
        if problem is not None:
            raise problem

    def has_room(self, owner: str) -> bool:
        """Whether a user may store anything more."""
        return _problem(self._config, self._store, owner, 1) is None

    def crowded_users(self) -> Collection[str]:
        """Returns the users who have nearly used up their quota, or all if the server has: less is kept for them."""
        share, budget = self._config.max_disk_bytes_per_user, self._config.max_disk_bytes
        if share is None and budget is None:
            return ()
        stored = self._store.disk_usage.by_owner()
        if budget is not None and sum(stored.values()) > CROWDED * budget:
            return stored.keys()
        return [owner for owner, total in stored.items() if share is not None and total > CROWDED * share]


def check_new_bytes(config: EngineConfig, store: Store, owner: str, num_bytes: int) -> None:
    """Raise :class:`NoRoom` if a user may not store so many more bytes: for uploads, which clients do not repeat."""
    problem = _problem(config, store, owner, num_bytes)
    if problem is not None:
        raise NoRoom(str(problem)) from problem


def _problem(config: EngineConfig, store: Store, owner: str, num_bytes: int) -> Busy | None:
    share, budget = config.max_disk_bytes_per_user, config.max_disk_bytes
    if share is not None:
        used = store.disk_usage.of(owner)
        stored = sum(used.values())
        if stored + num_bytes > share:
            return OverQuota(
                f"your data takes {stored} bytes ({_largest(used)}), and a user's quota is {share}; {_what_to_delete(used)}, "
                "then try again."
            )
    if budget is not None and (stored := store.disk_usage.total()) + num_bytes > budget:
        return Busy(
            f"the data of this server's users takes {stored} bytes of the {budget} it may use; "
            f"{_what_to_delete(store.disk_usage.of(owner))}, or ask its operator, then try again."
        )
    return None


def _largest(used: Mapping[str, int]) -> str:
    """Returns the kinds that take the most.

    >>> _largest({"images": 5, "checkpoints": 10, "logs": 1, "results": 7})
    'checkpoints 10, results 7, images 5'
    """
    largest = sorted(used.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{kind} {num_bytes}" for kind, num_bytes in largest)


def _what_to_delete(used: Mapping[str, int]) -> str:
    """Returns what a user can do about the kind that takes the most.

    >>> _what_to_delete({"images": 5, "checkpoints": 10})
    'delete checkpoints, or set a TTL on them'
    """
    return REMEDIES.get(max(used, key=lambda kind: used[kind], default=""), REMEDIES["checkpoints"])
