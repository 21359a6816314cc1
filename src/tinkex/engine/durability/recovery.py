"""Recovery at start: what an earlier engine accepted and did not finish is queued again.

Every run gets its accepted operations back, and accepted samples run again. The weights of a run are restored when it is first
needed, so a start costs nothing for runs that nobody uses again.
"""

from __future__ import annotations

import logging
import time

from tinkex._wire import json as wire_json
from tinkex.engine.durability.savepoints import forget_ended_runs
from tinkex.engine.durability.unrecoverable import UnrecoverableRuns, check_contents, check_files
from tinkex.engine.encoding import decode_request, failed
from tinkex.engine.integrity import CheckpointIntegrity
from tinkex.engine.lanes.interface import CorruptState
from tinkex.engine.lookup import resolve_sampler, run_lost
from tinkex.engine.operation import Kind, Operation
from tinkex.engine.running.table import OperationTable
from tinkex.engine.served_models import ServedModels
from tinkex.engine.store import FutureRow, Outcome, RunRow, RunStatus, Store
from tinkex.errors import EngineError, UnknownObject
from tinkex.types import SampleRequest

logger = logging.getLogger("tinkex.engine")


class Recovery:
    """Queues what an earlier engine left."""

    def __init__(
        self,
        store: Store,
        models: ServedModels,
        table: OperationTable,
        integrity: CheckpointIntegrity,
        unrecoverable: UnrecoverableRuns,
    ) -> None:
        self._store = store
        self._models = models
        self._table = table
        self._integrity = integrity
        self._unrecoverable = unrecoverable

    def recover(self) -> None:
        """Queue every accepted operation and sample; what cannot be recovered ends with an error that says why."""
        store = self._store
        runs = [*store.runs.with_status(RunStatus.LIVE, RunStatus.CREATING), *self._unrecoverable.kept()]
        recovered: set[str] = set()
        for run in runs:
            try:
                if run.status is RunStatus.CORRUPTED:
                    check_contents(store, run.run_id)
                self._recover_run(run)
                recovered.add(run.run_id)
            except CorruptState as error:
                self._unrecoverable.add(run.run_id, error)
                store.runs.set_status(run.run_id, RunStatus.CORRUPTED)
            else:
                if run.status is RunStatus.CORRUPTED:
                    logger.info("run %s is recovered", run.run_id)
                    store.runs.set_status(run.run_id, RunStatus.LIVE)
        forget_ended_runs(store, {run.run_id for run in runs})
        self._remove_unreferenced_files()
        self._recover_samples(recovered)
        self._integrity.scan()

    def _recover_run(self, run: RunRow) -> None:
        store, run_id = self._store, run.run_id
        savepoint, last = store.savepoints.get(run_id), store.journal.last_seq(run_id)
        pending = store.journal.pending(run_id)
        check_files(store, run_id)
        if savepoint is None and last is None and not any(row.seq_id == 0 for row in pending):
            raise CorruptState("neither a savepoint of it nor its creation is on record")
        for row in pending:
            if not row.intact:
                raise CorruptState(f"the journal of its operation {row.seq_id} is corrupt")
        next_seq = max(
            savepoint.next_seq if savepoint is not None else 0, last + 1 if last is not None else 0
        )
        if any(row.seq_id < next_seq for row in pending):
            raise CorruptState(f"its operation {pending[0].seq_id} is on record as run and as not run")
        try:
            model = self._models.find(run.base_model).source
        except UnknownObject:
            logger.warning("run %s waits: its model %s is not served now", run_id, run.base_model)
            pending, model = [], ""
        try:
            operations = [
                Operation(
                    row.request_id,
                    row.owner,
                    model,
                    run_id,
                    row.seq_id,
                    Kind(row.kind),
                    row.num_tokens,
                    decode_request(Kind(row.kind), row.body),
                )
                for row in pending
            ]
        except ValueError as error:
            raise CorruptState(f"the journal of its operations cannot be read ({error})") from error
        used = store.journal.used_numbers(run_id)
        self._table.resume_run(run_id, next_seq, used, operations, time.monotonic())

    def _recover_samples(self, recovered: set[str]) -> None:
        """Queue accepted samples, and end operations whose runs are gone."""
        store = self._store
        outcomes: list[tuple[str, Outcome]] = []
        for future in store.futures.pending():
            try:
                if future.kind == Kind.SAMPLE and future.request is not None:
                    self._recover_sample(future, wire_json.decode(future.request, SampleRequest))
                elif future.target not in recovered or store.journal.get(future.request_id) is None:
                    outcomes.append((future.request_id, failed(run_lost(store, future.target))))
            except (EngineError, wire_json.Malformed) as error:
                outcomes.append((future.request_id, failed(error)))
        with store.database.transaction():
            now = time.time()
            store.finished.add(outcomes, {}, now)
            store.futures.finish(outcomes, now)
            store.journal.drop_unrun(request_id for request_id, _ in outcomes)

    def _recover_sample(self, row: FutureRow, request: SampleRequest) -> None:
        sampler = resolve_sampler(self._store, self._models, self._integrity, row.owner, request)
        model = self._models.find(sampler.base_model).source
        self._table.add_sample(
            Operation(row.request_id, row.owner, model, row.target, row.seq_id or 0, Kind.SAMPLE, 1, request)
        )

    def _remove_unreferenced_files(self) -> None:
        store = self._store
        removed = store.directories.remove_unreferenced(
            [
                *store.checkpoints.directories(),
                *store.samplers.snapshot_directories(),
                *(row.file for row in store.savepoints.all()),
                *store.assets.files(),
            ]
        )
        if removed:
            logger.info("removed %d unfinished files", removed)
