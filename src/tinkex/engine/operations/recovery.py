"""Picking up after an earlier engine stopped, in whatever way it did.

At the start every run is put back in line with what was promised; promised samples run again. The weights of a run are
restored when it is first needed, so a start costs nothing for runs nobody comes back to.
"""

from __future__ import annotations

import logging
import time

from tinkex._wire import json as wire_json
from tinkex.engine.backend.seam import Damaged
from tinkex.engine.operations.access import lost
from tinkex.engine.operations.admission import Admission
from tinkex.engine.operations.lost import LostRuns, check_all, check_files
from tinkex.engine.operations.outcomes import failed
from tinkex.engine.operations.savepoints import forget_ended
from tinkex.engine.scheduler import Kind
from tinkex.engine.store import Outcome, RunRow, RunStatus, Store
from tinkex.errors import EngineError
from tinkex.types import SampleRequest

logger = logging.getLogger("tinkex.engine")


def recover(store: Store, admission: Admission, lost_runs: LostRuns) -> None:
    """Resume every run and sample that was promised; what cannot be resumed ends with an error that says why."""
    runs = [*store.runs.with_status(RunStatus.LIVE, RunStatus.CREATING), *lost_runs.kept()]
    resumed: set[str] = set()
    for run in runs:
        try:
            if run.status is RunStatus.CORRUPTED:
                check_all(store, run.run_id)
            _resume(store, admission, run)
            resumed.add(run.run_id)
        except Damaged as damage:
            lost_runs.add(run.run_id, damage)
            store.runs.set_status(run.run_id, RunStatus.CORRUPTED)
        else:
            if run.status is RunStatus.CORRUPTED:
                logger.info("run %s is back", run.run_id)
                store.runs.set_status(run.run_id, RunStatus.LIVE)
    forget_ended(store, {run.run_id for run in runs})
    litter = store.directories.clear_litter(
        [
            *store.checkpoints.directories(),
            *store.samplers.snapshot_directories(),
            *(row.file for row in store.savepoints.all()),
            *store.assets.files(),
        ]
    )
    if litter:
        logger.info("cleared away %d unfinished files", litter)
    _end_the_rest(store, admission, resumed)
    admission.intact.look_over()


def _resume(store: Store, admission: Admission, run: RunRow) -> None:
    savepoint, last = store.savepoints.get(run.run_id), store.journal.last_seq(run.run_id)
    pending = store.journal.pending(run.run_id)
    check_files(store, run.run_id)
    if savepoint is None and last is None and not any(row.seq_id == 0 for row in pending):
        raise Damaged("neither a savepoint of it nor its creation is on record")
    for row in pending:
        if not row.intact:
            raise Damaged(f"the journal of its operation {row.seq_id} is damaged")
    next_seq = max(savepoint.next_seq if savepoint is not None else 0, last + 1 if last is not None else 0)
    if any(row.seq_id < next_seq for row in pending):
        raise Damaged(f"its operation {pending[0].seq_id} is on record as run and as not run")
    try:
        admission.resume_run(run, next_seq, pending)
    except ValueError as error:
        raise Damaged(f"the journal of its operations cannot be read ({error})") from error


def _end_the_rest(store: Store, admission: Admission, resumed: set[str]) -> None:
    outcomes: list[tuple[str, Outcome]] = []
    for future in store.futures.pending():
        try:
            if future.kind == Kind.SAMPLE and future.request is not None:
                admission.resume_sample(future, wire_json.decode(future.request, SampleRequest))
            elif future.target not in resumed or store.journal.get(future.request_id) is None:
                outcomes.append((future.request_id, failed(lost(store, future.target))))
        except (EngineError, wire_json.Malformed) as error:
            outcomes.append((future.request_id, failed(error)))
    with store.database.transaction():
        now = time.time()
        store.finished.add(outcomes, {}, now)
        store.futures.finish(outcomes, now)
        store.journal.never_ran(request_id for request_id, _ in outcomes)
