"""Integrity of checkpoints: whether their files exist in full, checked before anything is accepted that needs them."""

from __future__ import annotations

import logging
import threading
import time

from tinkex.engine.health import Health
from tinkex.engine.store import CheckpointRow, Store
from tinkex.errors import Expired

logger = logging.getLogger("tinkex.engine")

SUBJECT = "checkpoints"
RECHECK_INTERVAL_S = 0.2
MAX_TRACKED = 100
"""How many corrupt checkpoints are rechecked; requests that need further ones fail all the same."""


class CheckpointIntegrity:
    """Rejects checkpoints whose files are missing or truncated, and degrades health until they are restored or deleted.

    Safe on any thread. The log names them; health, which is public, does not.
    """

    def __init__(self, store: Store, health: Health) -> None:
        self._store = store
        self._health = health
        self._lock = threading.Lock()
        self._corrupt: dict[str, CheckpointRow] = {}
        self._recheck_at = 0.0
        self._scanned_to = 0

    def check(self, checkpoint: CheckpointRow) -> None:
        """Raise ``Expired`` if the files of a checkpoint are not complete."""
        problem = self._problem(checkpoint)
        if problem is None:
            self._forget(checkpoint.path)
            return
        self._track(checkpoint, problem)
        raise Expired(
            f"checkpoint {checkpoint.path} cannot be read: {problem} on the server's disk. Nothing was changed. Its operator can "
            "put the files back; otherwise delete it and use another one: RestClient().list_user_checkpoints()"
        )

    def scan(self, limit: int | None = None) -> None:
        """Check the files of all checkpoints, or of the next ``limit``. Only called on the engine thread."""
        while True:
            rows, self._scanned_to = self._store.checkpoints.page_after(
                self._scanned_to, limit or MAX_TRACKED
            )
            for row in rows:
                problem = self._problem(row)
                # It may have been deleted, with its files, since it was listed.
                if problem is not None and self._store.checkpoints.get(row.run_id, row.kind, row.name) == row:
                    self._track(row, problem)
            if limit is not None or self._scanned_to == 0:
                return

    def recheck(self, *, force: bool = False) -> None:
        """Forget corrupt checkpoints that are complete again, or deleted; at most every 0.2 s unless forced."""
        now = time.monotonic()
        with self._lock:
            if not self._corrupt or not (force or now >= self._recheck_at):
                return
            self._recheck_at = now + RECHECK_INTERVAL_S
            tracked = list(self._corrupt.values())
        for checkpoint in tracked:
            known = self._store.checkpoints.get(checkpoint.run_id, checkpoint.kind, checkpoint.name)
            if known is None or self._problem(known) is None:
                self._forget(checkpoint.path)

    def _track(self, checkpoint: CheckpointRow, problem: str) -> None:
        with self._lock:
            if checkpoint.path not in self._corrupt and len(self._corrupt) < MAX_TRACKED:
                logger.error("checkpoint %s cannot be read: %s", checkpoint.path, problem)
                self._corrupt[checkpoint.path] = checkpoint
                self._update_health()

    def _forget(self, path: str) -> None:
        if path not in self._corrupt:
            return
        with self._lock:
            self._corrupt.pop(path, None)
            self._update_health()

    def _update_health(self) -> None:
        if self._corrupt:
            reason = (
                f"files of checkpoints are missing or damaged ({len(self._corrupt)} known); put them back, or delete these "
                "checkpoints; the log names them"
            )
            self._health.trouble(SUBJECT, reason)
        else:
            self._health.fine(SUBJECT)

    def _problem(self, checkpoint: CheckpointRow) -> str | None:
        size = self._store.directories.size(checkpoint.directory)
        if size is None:
            return "its files are missing"
        if size != checkpoint.size_bytes:
            return f"its files have {size} bytes instead of {checkpoint.size_bytes}"
        return None
