"""A training turn as a lane runs it: restore the runs that are not in memory, then run the operations."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from tinkex.engine.durability.replay import Replay
from tinkex.engine.durability.savepoints import SavepointWriter
from tinkex.engine.lanes.interface import WorkerLost
from tinkex.engine.lanes.lane import Lane
from tinkex.engine.operation import Kind
from tinkex.engine.outcomes import failed
from tinkex.engine.running.training import Result, TrainingRuns, TurnResult
from tinkex.engine.scheduler import Turn
from tinkex.errors import EngineFailure, TinkexError

logger = logging.getLogger("tinkex.engine")


@dataclass(frozen=True, eq=False)
class TrainingJob:
    """A training turn: restores the runs that are not in memory, then runs the operations."""

    turn: Turn
    number: int
    """The number of the turn in the journal."""
    runs: TrainingRuns
    replay: Replay
    savepoints: SavepointWriter

    def run(self, lane: Lane) -> TurnResult:
        """Run the turn; every error but the loss of the worker becomes the outcome of its operations."""
        del lane  # the runs have their backend
        operations = self.turn.operations
        corrupt: dict[str, str] = {}
        try:
            for operation in operations:
                if operation.seq_id > 0 and operation.run_id not in self.runs.live:
                    corrupt |= self.replay.restore(operation.run_id)
            started = time.monotonic()
            if self.turn.is_pass:
                result = self.runs.run_pass(operations)
            else:
                result = self.runs.run_barrier(operations[0])
            trained = any(operation.kind.trains for operation in operations)
            seconds = time.monotonic() - started if trained else 0.0
            self.savepoints.record_work({operation.run_id for operation in operations}, seconds)
        except WorkerLost:
            raise
        except TinkexError as error:
            result = TurnResult([Result(each, failed(error), ran=False) for each in operations])
        except Exception as error:
            logger.exception("an operation failed unexpectedly")
            failure = failed(EngineFailure(f"the engine failed: {type(error).__name__}: {error}"))
            result = TurnResult([Result(each, failure, ran=False) for each in operations])
        result.unrecoverable = corrupt
        first = result.results[0]
        if first.operation.kind is Kind.LOAD and first.succeeded:
            # The checkpoint may be deleted or replaced before a replay would read it again.
            written = self.savepoints.write_now(first.operation.run_id, self.number)
            if written is not None:
                result.changes.append(written)
        return result
