"""Supervision of a lane's worker: starting it again when it was lost, with back-off, and loading its models."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass

from tinkex.engine.health import Health
from tinkex.engine.lanes.interface import WorkerLost
from tinkex.engine.lanes.lane import Lane
from tinkex.engine.served_models import ServedModels
from tinkex.errors import SetupError

logger = logging.getLogger("tinkex.engine")

MIN_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
"""How long a worker that keeps crashing is left stopped, so that it does not take the machine down."""
STABLE_AFTER_S = 60.0
"""How long a worker has to run for earlier crashes to be forgotten."""


@dataclass(frozen=True)
class LoadModelsJob:
    """Loads every served model, or after a restart of the worker those that it had loaded."""

    models: ServedModels
    restart: bool

    def run(self, lane: Lane) -> None:
        """Load them; raises the first error, unless the worker is restarted: then operations that need the model fail."""
        if self.restart:
            lane.backend.start()
        for model in self.models.all:
            if model.known or not self.restart:
                try:
                    model.load_on(lane.backend)
                except Exception as error:
                    if not self.restart or isinstance(error, WorkerLost):
                        raise
                    logger.warning("the model %s cannot be loaded again: %s", model.source, error)


class WorkerSupervisor:
    """Decides when a lost worker is started again, with pauses that grow while it crashes. Only called on the engine thread."""

    def __init__(self, lane: Lane, models: ServedModels, health: Health, subject: str = "worker") -> None:
        self._lane = lane
        self._subject = subject
        self._models = models
        self._health = health
        self._num_crashes = 0
        self._lost_at = float("-inf")
        self._loading: Future[None] | None = None
        self.restart_at: float | None = None
        """When the worker is started again; None while it runs."""

    def start(self) -> None:
        """Start the worker for the first time."""
        try:
            self._lane.backend.start()
        except WorkerLost as lost:
            raise SetupError(f"the worker process did not start: {lost.reason}.") from lost

    def start_later(self, now: float) -> None:
        """Have the lane start the worker for the first time, with the models that are in use, as its first job."""
        self.restart_at = now

    def load_models(self) -> Future[None]:
        """Load every served model before anything else runs; safe on any thread."""
        self._health.starting("models are being loaded")
        loading: Future[None] = Future()
        self._loading = loading
        return loading

    def close(self) -> None:
        """Cancel the loading of models, and notify its waiters; the worker is not missed any more."""
        self._health.fine(self._subject)
        if self._loading is not None:
            self._loading.cancel()

    def record_loss(self, lost: WorkerLost, now: float, *, blamed: bool = False) -> None:
        """Schedule the restart of a worker that was lost: immediately if one user is ``blamed``, who is delayed instead of all."""
        if now - self._lost_at > STABLE_AFTER_S:
            self._num_crashes = 0
        self._lost_at = now
        pause = 0.0
        if self._num_crashes and not blamed:
            pause = min(MIN_PAUSE_S * 2 ** (self._num_crashes - 1), MAX_PAUSE_S)
        self._num_crashes += lost.own_fault and not blamed
        self.restart_at = now + pause
        logger.error("the worker was lost: %s; it is started again in %.1f s", lost.reason, pause)
        self._health.trouble(self._subject, f"the worker was lost ({lost.reason}) and is being started again")

    def record_success(self) -> None:
        """Forget crashes: the worker has completed a job."""
        self._num_crashes = 0

    def next_job(self, now: float) -> LoadModelsJob | None:
        """What has to run before any operation, if it is due; raises :class:`WorkerLost` if the idle worker has exited."""
        if self.restart_at is not None:
            return LoadModelsJob(self._models, restart=True) if now >= self.restart_at else None
        self._lane.backend.check()
        return LoadModelsJob(self._models, restart=False) if self._loading is not None else None

    @property
    def is_ready(self) -> bool:
        """Whether operations can be dispatched."""
        return self.restart_at is None and self._loading is None

    def loaded(self, job: LoadModelsJob, error: Exception | None) -> None:
        """Record that the worker runs again, or that the models are loaded, or why they cannot be."""
        if job.restart:
            self.restart_at = None
            self._health.fine(self._subject)
            logger.info("the worker is running again")
            return
        loading, self._loading = self._loading, None
        if loading is None or not loading.set_running_or_notify_cancel():
            return
        if error is not None:
            loading.set_exception(error)
        else:
            self._health.started()
            loading.set_result(None)
