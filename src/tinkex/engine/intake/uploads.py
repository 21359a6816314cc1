"""Uploads of external weights: files that arrive in any order and in parts, and become a checkpoint when they are complete.

What has arrived of a file is on disk and recorded before it is reported, so a client can continue after any crash. What is
being received is reserved against the user's quota in steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator
from typing import IO

from tinkex.engine.config import EngineConfig
from tinkex.engine.intake.checks import check_lora
from tinkex.engine.lanes.import_files import FILES
from tinkex.engine.lanes.interface import Backend, WorkerLost
from tinkex.engine.model.adapter_config import CONFIG_FILE, MAX_CONFIG_BYTES
from tinkex.engine.quotas import check_new_bytes
from tinkex.engine.served_models import ServedModels
from tinkex.engine.store import (
    CheckpointKind,
    CheckpointRow,
    RunRow,
    RunStatus,
    SessionRow,
    Store,
    UploadFileRow,
    UploadRow,
)
from tinkex.errors import (
    Busy,
    Conflict,
    Expired,
    InvalidInput,
    ModelUnavailable,
    NoRoom,
    OverQuota,
    StorageUnavailable,
    TooLarge,
    UnknownObject,
)
from tinkex.types import ExternalWeightsUploadStartRequest

logger = logging.getLogger("tinkex.engine")

RESERVED_BYTES = 16 * 1024 * 1024
"""How far a reservation is ahead of what has arrived; at each one the file is flushed to disk."""
MAX_OPEN_UPLOADS = 64
"""Unfinished uploads of one user."""
FINISH_TIMEOUT_S = 3600.0
"""An upload that is being finished does not expire before."""
CHECKPOINT_NAME = "uploaded"


class WeightUploads:
    """The uploads of all users. Safe on any thread; methods may take long."""

    def __init__(self, config: EngineConfig, store: Store, models: ServedModels, backend: Backend) -> None:
        self._config, self._store, self._models, self._backend = config, store, models, backend
        self._lock = threading.Lock()
        self._writers: dict[tuple[str, str], FileWriter] = {}
        self._finishing: set[str] = set()

    def start(self, owner: str, request: ExternalWeightsUploadStartRequest) -> UploadRow:
        """Record a new upload; its files can then be written."""
        self._models.find_for_use(request.base_model)
        check_lora(request.lora_config)
        now = time.time()
        row = UploadRow(
            upload_id=f"upload-{secrets.token_hex(12)}",
            owner=owner,
            base_model=request.base_model,
            lora=request.lora_config,
            created_at=now,
            expires_at=now + self._config.upload_retention_s,
            project_id=request.destination_project_id,
        )
        with self._store.database.transaction():
            if self._store.uploads.count_open(owner) >= MAX_OPEN_UPLOADS:
                raise OverQuota(
                    f"{MAX_OPEN_UPLOADS} uploads of yours are not finished, which is the limit; finish or cancel some."
                )
            check_new_bytes(self._config, self._store, owner, 1)
            self._store.uploads.add(row)
        return row

    def find(self, owner: str, upload_id: str) -> UploadRow:
        """Returns a user's upload; raises :class:`UnknownObject`, also for other users' uploads."""
        row = self._store.uploads.get(upload_id)
        if row is None or row.owner != owner:
            raise UnknownObject(
                f"you have no upload {upload_id!r}; it was cancelled or rejected, has expired, or was never started. "
                "Start one with external_weights_upload_start."
            )
        return row

    def received(self, upload: UploadRow, name: str) -> UploadFileRow:
        """Returns what has arrived of a file and is on disk, also while it is being written."""
        writer = self._writers.get((upload.upload_id, name))
        if writer is not None:
            writer.flush()
        return self._store.uploads.file(upload.upload_id, name) or UploadFileRow(
            upload.upload_id, name, 0, None
        )

    def open(self, upload: UploadRow, name: str, start: int = 0, total: int | None = None) -> FileWriter:
        """Open a file of an upload for writing from ``start`` on; ``total`` is its size, if that is known.

        A writer of the same file that is still open is closed: its client has lost the connection, or sends the file
        twice.
        """
        limit = self._config.max_upload_bytes
        if name == CONFIG_FILE:
            limit = min(limit, MAX_CONFIG_BYTES)
        if total is not None and total > limit:
            raise _too_large(name, limit)
        key = (upload.upload_id, name)
        with self._lock:
            self._check_open(upload)
            previous = self._writers.pop(key, None)
            if previous is not None:
                previous.close()
            received = self.received(upload, name).received_bytes
            if start > received:
                raise Conflict(f"{name} of {upload.upload_id} has changed since; send the whole file.")
            if total is not None:  # rejected before it is sent
                check_new_bytes(self._config, self._store, upload.owner, total - received)
            writer = FileWriter(self._config, self._store, upload, name, start, total, limit)
            self._writers[key] = writer
        return writer

    def close(self, writer: FileWriter) -> None:
        """Close a writer; what it has written is kept, so that the client can send the rest."""
        with self._lock:
            if self._writers.get(writer.key) is writer:
                del self._writers[writer.key]
        writer.close()

    def finish(self, owner: str, upload_id: str) -> str:
        """Turn an upload into a checkpoint and return its path; the same path if it is finished already.

        If a file is missing the upload stays open. If one is invalid, the upload is deleted with its files.
        """
        with self._closed_for_writing(owner, upload_id) as upload:
            if upload.tinker_path is not None:
                return upload.tinker_path
            for name in FILES:
                self._check_complete(upload, name)
            self._store.uploads.extend(upload_id, time.time() + FINISH_TIMEOUT_S)
            try:
                path = self._import(upload)
            except InvalidInput:
                self._delete(upload)
                raise
            except WorkerLost as lost:
                raise ModelUnavailable(
                    f"the worker that would import {upload_id} is being started again ({lost.reason}); finish it again."
                ) from lost
            except OSError as error:
                raise _write_error(error) from error
            self._store.directories.remove(upload.directory)
        return path

    def cancel(self, owner: str, upload_id: str) -> None:
        """Delete an upload that is not finished, with its files."""
        with self._closed_for_writing(owner, upload_id) as upload:
            if upload.tinker_path is not None:
                raise Conflict(
                    f"{upload_id} is finished; to undo it, delete the checkpoint {upload.tinker_path}."
                )
            self._delete(upload)

    def _check_open(self, upload: UploadRow) -> None:
        current = self._store.uploads.get(upload.upload_id)
        if current is None or current.expires_at <= time.time():
            raise Expired(f"{upload.upload_id} was cancelled or rejected, or has expired; start a new one.")
        if current.tinker_path is not None or upload.upload_id in self._finishing:
            raise Conflict(f"{upload.upload_id} is finished; start a new one to send other files.")

    @contextlib.contextmanager
    def _closed_for_writing(self, owner: str, upload_id: str) -> Iterator[UploadRow]:
        with self._lock:
            upload = self.find(owner, upload_id)
            if upload_id in self._finishing:
                raise Busy(f"{upload_id} is being finished by another request; wait for it.")
            self._finishing.add(upload_id)
            for name in FILES:
                writer = self._writers.pop((upload_id, name), None)
                if writer is not None:
                    writer.close()
        try:
            yield upload
        finally:
            with self._lock:
                self._finishing.discard(upload_id)

    def _check_complete(self, upload: UploadRow, name: str) -> None:
        file = self.received(upload, name)
        if not file.is_complete:
            received = f"{file.received_bytes} of {file.total_bytes or 'an unknown number of'} bytes"
            problem = "has not been sent" if not file.received_bytes else f"is incomplete ({received})"
            raise InvalidInput(
                f"{name} of {upload.upload_id} {problem}; PUT it to its URL, then finish the upload."
            )

    def _import(self, upload: UploadRow) -> str:
        store, now = self._store, time.time()
        base = self._models.find(upload.base_model).find_directory()
        session = SessionRow(
            str(uuid.uuid4()),
            upload.owner,
            now,
            now,
            project_id=upload.project_id,
            display_name=upload.upload_id,
        )
        run_id, kind = f"{session.session_id}:train:0", CheckpointKind.EXTERNAL_WEIGHTS
        with store.directories.checkpoint(run_id, kind, CHECKPOINT_NAME) as writing:
            source = store.directories.resolve(upload.directory)
            self._backend.import_weights(source, writing.temporary, base, upload.base_model, upload.lora)
        run = RunRow(
            run_id=run_id,
            session_id=session.session_id,
            owner=upload.owner,
            base_model=upload.base_model,
            created_at=now,
            used_at=now,
            status=RunStatus.RELEASED,  # no weights in memory
            lora=upload.lora,
        )
        row = CheckpointRow(
            run_id=run_id,
            kind=kind,
            name=CHECKPOINT_NAME,
            owner=upload.owner,
            base_model=upload.base_model,
            lora=upload.lora,
            has_optimizer=False,
            created_at=now,
            size_bytes=writing.size_bytes,
            directory=writing.final,
        )
        try:
            with store.database.transaction():
                # The files of the upload no longer count, and are removed after the commit.
                store.uploads.finish(upload.upload_id, row.path)
                check_new_bytes(self._config, store, upload.owner, row.size_bytes)
                store.sessions.add(session)
                store.sessions.finish(session.session_id, now, "success", None)
                store.runs.add(run)
                store.checkpoints.put(row)
        except BaseException:
            store.directories.remove(row.directory)
            raise
        return row.path

    def _delete(self, upload: UploadRow) -> None:
        self._store.uploads.delete(upload.upload_id)
        self._store.directories.remove(upload.directory)


class FileWriter:
    """Writes one file of an upload; see :meth:`WeightUploads.open`. Safe on any thread."""

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        upload: UploadRow,
        name: str,
        start: int,
        total: int | None,
        limit: int,
    ) -> None:
        self._config, self._store, self._upload, self._name = config, store, upload, name
        self._size, self._total, self._limit = start, total, limit
        self.key = (upload.upload_id, name)
        self._lock = threading.Lock()
        self._complete = False
        self._reserved = start
        self._record(start)  # before anything is cut off
        path = store.directories.create(upload.directory) / name
        try:
            self._file: IO[bytes] | None = path.open("r+b" if start else "wb", buffering=0)
            self._file.truncate(start)
            self._file.seek(start)
        except OSError as error:
            raise _write_error(error) from error

    def write(self, data: bytes) -> None:
        """Append data; raises ``TooLarge``, ``NoRoom`` or ``StorageUnavailable``, and ``Conflict`` if the writer is closed."""
        with self._lock:
            if self._file is None:
                raise Conflict(
                    f"another request writes {self._name}, or the upload has ended; stop this one."
                )
            size = self._size + len(data)
            if size > (self._limit if self._total is None else self._total):
                if self._total is None:
                    raise _too_large(self._name, self._limit)
                raise InvalidInput(
                    f"{self._name} has more than the {self._total} bytes that were announced; send it again."
                )
            try:
                if size > self._reserved:
                    self._reserve(size)
                left = memoryview(data)
                while left:
                    left = left[self._file.write(left) :]
            except OSError as error:
                self._discard()
                raise _write_error(error) from error
            self._size = size

    def finish(self) -> None:
        """Declare that everything was written that the request had."""
        with self._lock:
            self._complete = True

    def flush(self) -> None:
        """Flush what was written, and record it."""
        with self._lock:
            if self._file is not None:
                self._flush()

    def close(self) -> None:
        """Flush the file and record how much of it is on disk."""
        with self._lock:
            if self._file is None:
                return
            if self._complete and self._total is None:
                self._total = self._size
            self._reserved = self._size
            try:
                self._flush()
            finally:
                if self._file is not None:
                    self._file.close()
                    self._file = None

    def _flush(self) -> None:
        assert self._file is not None
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._discard()
            raise _write_error(error) from error
        self._record(self._reserved)

    def _reserve(self, size: int) -> None:
        """Flush what was written, and reserve room for ``size`` bytes, and for more if there is some."""
        assert self._file is not None
        os.fsync(self._file.fileno())
        ahead = min(size + RESERVED_BYTES, self._limit if self._total is None else self._total)
        with self._store.database.transaction():
            try:
                check_new_bytes(self._config, self._store, self._upload.owner, ahead - self._reserved)
            except NoRoom:
                check_new_bytes(self._config, self._store, self._upload.owner, size - self._reserved)
                ahead = size
            self._record(ahead)
        self._reserved = ahead

    def _record(self, reserved_bytes: int) -> None:
        row = UploadFileRow(self._upload.upload_id, self._name, self._size, self._total)
        try:
            self._store.uploads.put_file(row, self._upload.owner, reserved_bytes)
        except sqlite3.IntegrityError:
            raise Expired(
                f"{self._upload.upload_id} was cancelled, or has expired; start a new one."
            ) from None

    def _discard(self) -> None:
        """Delete the file: on a full disk its space is needed, and after a failed flush its content is unknown."""
        assert self._file is not None
        self._file.close()
        self._file = None
        self._store.directories.resolve(self._upload.directory).joinpath(self._name).unlink(missing_ok=True)
        with contextlib.suppress(sqlite3.Error):
            self._store.uploads.delete_file(self._upload.upload_id, self._name)


def _too_large(name: str, limit: int) -> TooLarge:
    return TooLarge(f"{name} is larger than this server's limit of {limit} bytes for such a file.")


def _write_error(error: OSError) -> StorageUnavailable:
    return StorageUnavailable(
        f"the server cannot write the upload ({error.strerror or error}); try again later."
    )
