"""Recovery at start: what an earlier engine accepted and did not finish is queued again.

Every run gets its accepted operations back, and accepted samples run again. The weights of a run are restored when it is first
needed, so a start costs nothing for runs that are never used again. A run that cannot be restored fails alone, is named in the log and
counted in health, and is tried again at the next start. What is left of it is kept as long as its session would have kept it: a file
that was only missing can be put back, and a replay that ran out of memory may find more of it.
"""

from __future__ import annotations

import contextlib
import logging
import time

from tinkex.engine.config import EngineConfig
from tinkex.engine.durability.savepoints import forget_ended_runs
from tinkex.engine.encoding import body_size, decode_request, failed
from tinkex.engine.health import Health
from tinkex.engine.integrity import CheckpointIntegrity
from tinkex.engine.lanes.interface import CorruptState
from tinkex.engine.lookup import resolve_sampler, run_lost
from tinkex.engine.operation import Kind, Operation
from tinkex.engine.passes import digest_of, find_custom_loss
from tinkex.engine.running.table import OperationTable
from tinkex.engine.served_models import ServedModels
from tinkex.engine.store import Outcome, RunRow, RunStatus, Store, file_digest
from tinkex.errors import EngineError, UnknownObject
from tinkex.types import ForwardBackwardRequest, SampleRequest

logger = logging.getLogger("tinkex.engine")

SUBJECT = "runs"


class UnrecoverableRuns:
    """The runs that could not be restored since the start. Only called on the engine thread."""

    def __init__(self, config: EngineConfig, store: Store, health: Health) -> None:
        self._config = config
        self._store = store
        self._health = health
        self._run_ids: set[str] = set()

    def add(self, run_id: str, reason: object) -> None:
        """Record that a run cannot be restored, and why."""
        logger.error("run %s cannot be restored: %s", run_id, reason)
        self._run_ids.add(run_id)
        self._update_health()

    def kept(self) -> list[RunRow]:
        """The unrecoverable runs of which something is left, and whose sessions are not over."""
        now = time.time()
        left = self._store.journal.runs() | {row.run_id for row in self._store.savepoints.all()}
        runs = [
            run
            for run in self._store.runs.with_status(RunStatus.CORRUPTED)
            if run.run_id in left and not self._is_over(run, now)
        ]
        kept = {run.run_id for run in runs}
        if self._run_ids - kept:
            self._run_ids &= kept
            self._update_health()
        return runs

    def _is_over(self, run: RunRow, now: float) -> bool:
        session = self._store.sessions.get(run.session_id)
        return session is None or (
            session.seen_at < now - self._config.session_idle_s
            or (session.finished_at or now) < now - self._config.session_grace_s
        )

    def _update_health(self) -> None:
        reason = (
            f"{len(self._run_ids)} runs could not be restored; the log says which and why. Put missing files back, then start the "
            "server again; or have their owners continue from checkpoints"
        )
        self._health.note(SUBJECT, reason if self._run_ids else None)


def recover(
    store: Store,
    models: ServedModels,
    table: OperationTable,
    integrity: CheckpointIntegrity,
    unrecoverable: UnrecoverableRuns,
) -> None:
    """Queue every accepted operation and sample; what cannot be recovered ends with an error that says why."""
    runs = [*store.runs.with_status(RunStatus.LIVE, RunStatus.CREATING), *unrecoverable.kept()]
    recovered: set[str] = set()
    for run in runs:
        try:
            if run.status is RunStatus.CORRUPTED:
                _check_contents(store, run.run_id)
            _recover_run(store, models, table, run)
            recovered.add(run.run_id)
        except CorruptState as error:
            unrecoverable.add(run.run_id, error)
            store.runs.set_status(run.run_id, RunStatus.CORRUPTED)
        else:
            if run.status is RunStatus.CORRUPTED:
                logger.info("run %s is recovered", run.run_id)
                store.runs.set_status(run.run_id, RunStatus.LIVE)
    forget_ended_runs(store, {run.run_id for run in runs})
    _remove_unreferenced_files(store)
    _recover_samples(store, models, table, integrity, recovered)
    integrity.scan()


def _recover_run(store: Store, models: ServedModels, table: OperationTable, run: RunRow) -> None:
    """Queue the operations of a run. Their requests are checked one by one, and stay on disk."""
    run_id = run.run_id
    savepoint, last = store.savepoints.get(run_id), store.journal.last_seq(run_id)
    _check_files(store, run_id)
    try:
        model = models.find(run.base_model).source
    except UnknownObject:
        logger.warning("run %s waits: its model %s is not served now", run_id, run.base_model)
        model = ""
    pending = [_read_pending(store, request_id, model) for request_id in store.journal.pending(run_id)]
    if savepoint is None and last is None and not any(each.seq_id == 0 for each in pending):
        raise CorruptState("neither a savepoint of it nor its creation is on record")
    next_seq = max(savepoint.next_seq if savepoint is not None else 0, last + 1 if last is not None else 0)
    if any(operation.seq_id < next_seq for operation in pending):
        raise CorruptState(f"its operation {pending[0].seq_id} is on record as run and as not run")
    used = store.journal.used_numbers(run_id)
    table.resume_run(run_id, next_seq, used, pending if model else [], time.monotonic())


def _read_pending(store: Store, request_id: str, model: str) -> Operation:
    row = store.journal.get(request_id)
    if row is None or not row.intact:
        raise CorruptState(f"the journal of its operation {row.seq_id if row else request_id} is corrupt")
    try:
        kind = Kind(row.kind)
        request = decode_request(kind, row.body)
    except ValueError as error:
        raise CorruptState(f"the journal of its operations cannot be read ({error})") from error
    operation = Operation(request_id, row.owner, model, row.run_id, row.seq_id, kind, row.num_tokens)
    operation.num_bytes = body_size(row.body)
    if isinstance(request, ForwardBackwardRequest):
        operation.num_datums = len(request.data)
        with contextlib.suppress(EngineError):  # it fails with it when it runs
            operation.loss = digest_of(find_custom_loss(store, row.owner, request))
    return operation


def _recover_samples(
    store: Store,
    models: ServedModels,
    table: OperationTable,
    integrity: CheckpointIntegrity,
    recovered: set[str],
) -> None:
    """Queue accepted samples, and end operations whose runs are gone."""
    outcomes: list[tuple[str, Outcome]] = []
    for row in store.futures.pending():
        try:
            recorded = store.futures.request(row.request_id) if row.kind == Kind.SAMPLE else None
            if recorded is not None:
                request = decode_request(Kind.SAMPLE, recorded)
                assert isinstance(request, SampleRequest)
                sampler = resolve_sampler(store, models, integrity, row.owner, request)
                model, seq_id, size = (
                    models.find(sampler.base_model).source,
                    row.seq_id or 0,
                    body_size(recorded),
                )
                table.add(
                    Operation(
                        row.request_id, row.owner, model, row.target, seq_id, Kind.SAMPLE, 1, num_bytes=size
                    ),
                    time.monotonic(),
                )
            elif row.target not in recovered or store.journal.get(row.request_id) is None:
                outcomes.append((row.request_id, failed(run_lost(store, row.target))))
        except (EngineError, ValueError) as error:
            outcomes.append((row.request_id, failed(error)))
    with store.database.transaction():
        now = time.time()
        store.finished.add(outcomes, {}, now)
        store.futures.finish(outcomes, now)
        store.journal.drop_unrun(request_id for request_id, _ in outcomes)


def _remove_unreferenced_files(store: Store) -> None:
    store.uploads.release_reservations()
    removed = store.directories.remove_unreferenced(
        [
            *store.checkpoints.directories(),
            *store.samplers.snapshot_directories(),
            *(row.file for row in store.savepoints.all()),
            *store.assets.files(),
            *store.uploads.directories(),
        ]
    )
    if removed:
        logger.info("removed %d unfinished files", removed)


def _check_files(store: Store, run_id: str) -> None:
    """Raise :class:`CorruptState` if the savepoint file of a run is not there in full; its contents are checked when it is read."""
    savepoint = store.savepoints.get(run_id)
    if savepoint is not None:
        path = store.directories.resolve(savepoint.file)
        if not path.is_file() or path.stat().st_size != savepoint.size_bytes:
            raise CorruptState(f"its savepoint {savepoint.file} is missing or truncated")


def _check_contents(store: Store, run_id: str) -> None:
    """Raise :class:`CorruptState` if anything that a run would be restored from is not as it was written."""
    _check_files(store, run_id)
    savepoint = store.savepoints.get(run_id)
    if savepoint is not None and file_digest(store.directories.resolve(savepoint.file)) != savepoint.digest:
        raise CorruptState(f"its savepoint {savepoint.file} is corrupt")
    for entry in store.journal.turns([run_id]):
        row = store.journal.get(entry.request_id)
        if row is None or not row.intact:
            raise CorruptState(f"the journal of its operation {entry.seq_id} is corrupt")
