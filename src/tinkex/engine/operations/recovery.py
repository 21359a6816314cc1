"""Picking up after an earlier engine stopped, in whatever way it did.

What survives: sessions, checkpoints, samplers on saved weights, and results. Samples that were promised run now. The live
weights of training runs do not survive: those runs are marked corrupted, and their promised operations fail with
an error that names the last checkpoint.
"""

from __future__ import annotations

import logging
import time

from tinkex._wire import json as wire_json
from tinkex.engine.operations.access import how_to_resume
from tinkex.engine.operations.admission import Admission
from tinkex.engine.operations.outcomes import failed
from tinkex.engine.scheduler import Kind
from tinkex.engine.store import FutureRow, Outcome, RunStatus, Store
from tinkex.errors import EngineError, ModelUnavailable
from tinkex.types import SampleRequest

logger = logging.getLogger("tinkex.engine")


def recover(store: Store, admission: Admission) -> None:
    """Bring the records in line with the fact that nothing is in memory, and resume what can be."""
    litter = store.directories.clear_litter(
        [*store.checkpoints.directories(), *store.samplers.snapshot_directories()]
    )
    if litter:
        logger.info("cleared away %d unfinished weight directories", litter)
    for run in store.runs.with_status(RunStatus.LIVE, RunStatus.CREATING):
        lost = RunStatus.CORRUPTED if run.status is RunStatus.LIVE else RunStatus.FAILED
        store.runs.set_status(run.run_id, lost)
    outcomes: list[tuple[str, Outcome]] = []
    for future in store.futures.pending():
        if future.kind == Kind.SAMPLE and future.request is not None:
            try:
                admission.resume_sample(future, wire_json.decode(future.request, SampleRequest))
            except (EngineError, wire_json.Malformed) as error:
                outcomes.append((future.request_id, failed(error)))
        else:
            outcomes.append((future.request_id, failed(_lost(store, future))))
    store.futures.finish(outcomes, time.time())


def _lost(store: Store, future: FutureRow) -> EngineError:
    return ModelUnavailable(
        f"the server restarted before this {future.kind} of run {future.target} was done, and the live weights of the run "
        f"are gone. {how_to_resume(store, future.target)}"
    )
