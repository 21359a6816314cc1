"""Quotas of users: how many runs each may have in memory, and how many bytes each may store.

What exceeds a quota is rejected with an error that says how to free some; other users are not affected.
"""

from __future__ import annotations

import time

from tinkex.engine.config import EngineConfig
from tinkex.engine.store import RunStatus, Store
from tinkex.errors import Busy, NoRoom, OverQuota


class Quotas:
    """Rejects what exceeds a user's quota or the server's limit. Safe on any thread."""

    def __init__(self, config: EngineConfig, store: Store) -> None:
        self._config = config
        self._store = store

    def check_new_run(self, owner: str) -> None:
        """Raise if a user may not have one more run in memory."""
        own = self._config.max_live_runs_per_user
        if own is not None and self._num_live(owner) >= own:
            raise OverQuota(
                f"{own} runs of yours are live, which is a user's quota; close sessions that are done, or unload runs "
                "that are not needed."
            )
        # Accepted ones count, and those that are restored when they are next used.
        if self._num_live(None) >= self._config.max_live_runs:
            raise Busy(
                f"{self._config.max_live_runs} runs are in memory, which is this server's limit; close sessions that are "
                "done, or unload runs that are not needed."
            )

    def _num_live(self, owner: str | None) -> int:
        return self._store.runs.count_in(owner, RunStatus.LIVE, RunStatus.CREATING)

    def check_new_checkpoint(self, owner: str) -> None:
        """Raise if a user may not store one more checkpoint: called on acceptance, and again when it is written."""
        share, budget = self._config.max_disk_bytes_per_user, self._config.max_disk_bytes
        if budget is not None and (stored := stored_bytes(self._store, None)) >= budget:
            raise Busy(
                f"the checkpoints and images of this server take {stored} bytes of the {budget} it may use; delete some, or set a TTL on "
                "them, then save again."
            )
        if share is not None and (stored := stored_bytes(self._store, owner)) >= share:
            raise OverQuota(
                f"your checkpoints and images take {stored} bytes, and a user's quota is {share}; delete some, or set a TTL on them, "
                "then save again."
            )


def stored_bytes(store: Store, owner: str | None) -> int:
    """What one user, or all of them, store: live checkpoints and assets."""
    now = time.time()
    return store.checkpoints.total_bytes(owner, now) + store.assets.total_bytes(owner, now)


def check_new_bytes(config: EngineConfig, store: Store, owner: str, num_bytes: int) -> None:
    """Raise :class:`NoRoom` if a user may not store so many more bytes."""
    budget, share = config.max_disk_bytes, config.max_disk_bytes_per_user
    if budget is not None and stored_bytes(store, None) + num_bytes > budget:
        raise NoRoom(
            f"this server may store {budget} bytes, and they are used up; delete checkpoints or images that are not needed."
        )
    if share is not None and (stored := stored_bytes(store, owner)) + num_bytes > share:
        raise NoRoom(
            f"your checkpoints and images take {stored} bytes, and a user's quota is {share}; delete some, or set a TTL on "
            "them, then upload again."
        )
