"""Whether the files of a checkpoint are there: asked before anything is promised that needs them."""

from __future__ import annotations

import logging
import threading
import time

from tinkex.engine.operations.health import Health
from tinkex.engine.store import CheckpointRow, Store
from tinkex.errors import Expired

logger = logging.getLogger("tinkex.engine")

CHECKPOINTS = "checkpoints"
LOOK_AGAIN_S = 0.2
MOST_NOTED = 100
"""How many damaged checkpoints are looked at again; whoever finds the next one is told all the same."""


class Intact:
    """Refuses checkpoints whose files are missing or cut short, and has health say so until they are back or deleted.

    Safe to use from any thread. The log names them; health, which anybody may ask, does not.
    """

    def __init__(self, store: Store, health: Health) -> None:
        self._store = store
        self._health = health
        self._lock = threading.Lock()
        self._noted: dict[str, CheckpointRow] = {}
        self._look_again = 0.0
        self._next = 0

    def check(self, checkpoint: CheckpointRow) -> None:
        """Raise what is wrong with the files of a checkpoint."""
        damage = self._damage(checkpoint)
        if damage is None:
            self._forget(checkpoint.path)
            return
        self._note(checkpoint, damage)
        raise Expired(
            f"checkpoint {checkpoint.path} cannot be read: {damage} on the server's disk. Nothing was changed. Its operator can "
            "put the files back; otherwise delete it and use another one: RestClient().list_user_checkpoints()"
        )

    def look_over(self, limit: int | None = None) -> None:
        """Look for the files of checkpoints nobody asked for: of all, or of the next ``limit``. Belongs to the engine thread."""
        while True:
            rows, self._next = self._store.checkpoints.after(self._next, limit or MOST_NOTED)
            for row in rows:
                damage = self._damage(row)
                # It may have been deleted, with its files, since it was listed.
                if damage is not None and self._store.checkpoints.get(row.run_id, row.kind, row.name) == row:
                    self._note(row, damage)
            if limit is not None or self._next == 0:
                return

    def _note(self, checkpoint: CheckpointRow, damage: str) -> None:
        with self._lock:
            if checkpoint.path not in self._noted and len(self._noted) < MOST_NOTED:
                logger.error("checkpoint %s cannot be read: %s", checkpoint.path, damage)
                self._noted[checkpoint.path] = checkpoint
                self._tell()

    def look_again(self) -> None:
        """Take back what was noted of checkpoints that are sound again, or gone."""
        now = time.monotonic()
        with self._lock:
            noted = list(self._noted.values()) if now >= self._look_again else []
            self._look_again = now + LOOK_AGAIN_S if noted else self._look_again
        for checkpoint in noted:
            known = self._store.checkpoints.get(checkpoint.run_id, checkpoint.kind, checkpoint.name)
            if known is None or self._damage(known) is None:
                self._forget(checkpoint.path)

    def _forget(self, path: str) -> None:
        if path not in self._noted:
            return
        with self._lock:
            self._noted.pop(path, None)
            self._tell()

    def _tell(self) -> None:
        if self._noted:
            reason = (
                f"files of checkpoints are missing or damaged ({len(self._noted)} known); put them back, or delete these checkpoints; "
                "the log names them"
            )
            self._health.trouble(CHECKPOINTS, reason)
        else:
            self._health.fine(CHECKPOINTS)

    def _damage(self, checkpoint: CheckpointRow) -> str | None:
        size = self._store.directories.size(checkpoint.directory)
        if size is None:
            return "its files are missing"
        if size != checkpoint.size_bytes:
            return f"its files have {size} bytes instead of {checkpoint.size_bytes}"
        return None
