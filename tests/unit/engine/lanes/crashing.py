"""A backend in a worker process that crashes in the middle of chosen calls."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.unit.engine.test_engine import config
from tinkex.engine.engine import Engine
from tinkex.engine.lanes.interface import DecodeReport, DecodeStep, PassJob, PassReport, StepResult
from tinkex.engine.lanes.remote import Callbacks
from tinkex.engine.lanes.worker_process import ProcessBackend
from tinkex.types import AdamParams

PATIENCE_S = 120.0

Condition = Callable[[str, Any], bool]


class CrashingBackend(ProcessBackend):
    """Sends its worker a signal when ``crashes(call, argument)`` holds, before the call reaches it.

    The argument is the run ids of a pass, (run id, parameters) of a step, or the requests in the batch of a decode step.
    """

    def __init__(self, engine_config: Any) -> None:
        super().__init__(engine_config, Callbacks(None, lambda: None, lambda _: None))
        self.crashes: Condition = lambda call, argument: False
        self.number = signal.SIGSEGV
        self.killed: list[int] = []
        self._batch: set[str] = set()

    def run_pass(self, jobs: Sequence[PassJob], *, share_prefixes: bool) -> Sequence[PassReport] | None:
        self._crash_if("pass", {job.run_id for job in jobs})
        return super().run_pass(jobs, share_prefixes=share_prefixes)

    def resume_pass(self) -> Sequence[PassReport] | None:
        self._crash_if("resume", None)
        return super().resume_pass()

    def optim_steps(self, steps: Sequence[tuple[str, AdamParams]], results: list[StepResult]) -> None:
        for step in steps:
            self._crash_if("step", step)
            super().optim_steps([step], results)

    def sample(self, source: str, step: DecodeStep) -> DecodeReport:
        self._batch |= {request.request_id for request in step.add}
        self._crash_if("decode", set(self._batch))
        report = super().sample(source, step)
        self._batch -= {request_id for request_id, _ in report.ended} | set(step.cancel)
        return report

    def _crash_if(self, call: str, argument: Any) -> None:
        worker = self.status.pid
        if worker is not None and self.crashes(call, argument):
            self._batch = set()
            self.killed.append(worker)
            os.kill(worker, self.number)
            while self.status.pid == worker:
                time.sleep(0.001)


def crashing_engine(home: Path, model: Path, **settings: Any) -> tuple[Engine, CrashingBackend]:
    """A started engine on such a backend."""
    engine_config = config(home, model, worker="process", **settings)
    backend = CrashingBackend(engine_config)
    engine = Engine(engine_config, backends=[backend])
    engine.start()
    engine.load_models().result(PATIENCE_S)
    return engine, backend
