"""Shares of users: how many runs each may have in memory, and how much each may keep.

What is over a share is refused for now, with an error that says how to make room; nothing of other users is touched.
"""

from __future__ import annotations

import time

from tinkex.engine.config import EngineConfig
from tinkex.engine.store import RunStatus, Store
from tinkex.errors import Busy, NoRoom, OverQuota


class Quotas:
    """Refuses, for now, what is over a user's share or the server's limit. Safe to use from any thread."""

    def __init__(self, config: EngineConfig, store: Store) -> None:
        self._config = config
        self._store = store

    def new_run(self, owner: str) -> None:
        """Whether a user may have one more run in memory."""
        own = self._config.max_live_runs_per_user
        if own is not None and self._num_live(owner) >= own:
            raise OverQuota(
                f"{own} runs of yours are live, which is a user's share; close sessions that are done, or unload runs "
                "that are not needed."
            )
        # Those that are promised count, and those that come back into memory when they are next used.
        if self._num_live(None) >= self._config.max_live_runs:
            raise Busy(
                f"{self._config.max_live_runs} runs are in memory, which is this server's limit; close sessions that are "
                "done, or unload runs that are not needed."
            )

    def _num_live(self, owner: str | None) -> int:
        return self._store.runs.count_in(owner, RunStatus.LIVE, RunStatus.CREATING)

    def new_checkpoint(self, owner: str) -> None:
        """Whether a user may keep one more checkpoint: asked when it is accepted, and again when it is written."""
        share, budget = self._config.max_disk_bytes_per_user, self._config.max_disk_bytes
        if budget is not None and (kept := kept_bytes(self._store, None)) >= budget:
            raise Busy(
                f"the checkpoints and images of this server take {kept} bytes of the {budget} it may use; delete some, or set a TTL on "
                "them, then save again."
            )
        if share is not None and (kept := kept_bytes(self._store, owner)) >= share:
            raise OverQuota(
                f"your checkpoints and images take {kept} bytes, and a user's share is {share}; delete some, or set a TTL on them, "
                "then save again."
            )


def kept_bytes(store: Store, owner: str | None) -> int:
    """What one user, or all of them, keep on disk: live checkpoints and assets."""
    now = time.time()
    return store.checkpoints.total_bytes(owner, now) + store.assets.total_bytes(owner, now)


def check_room(config: EngineConfig, store: Store, owner: str, more: int) -> None:
    """Whether a user may keep so many more bytes; :class:`NoRoom` if not."""
    budget, share = config.max_disk_bytes, config.max_disk_bytes_per_user
    if budget is not None and kept_bytes(store, None) + more > budget:
        raise NoRoom(
            f"this server may keep {budget} bytes, and they are used up; delete checkpoints or images that are not needed."
        )
    if share is not None and (kept := kept_bytes(store, owner)) + more > share:
        raise NoRoom(
            f"your checkpoints and images take {kept} bytes, and a user's share is {share}; delete some, or set a TTL on "
            "them, then upload again."
        )
