"""Bringing the worker back when it died, and the models into its memory. Belongs to the engine thread."""

from __future__ import annotations

import logging
from concurrent.futures import Future

from tinkex.engine.backend.seam import Backend, WorkerDied
from tinkex.engine.operations.health import Health
from tinkex.engine.operations.served import ServedModels
from tinkex.errors import SetupError

logger = logging.getLogger("tinkex.engine")

SUBJECT = "worker"
SHORTEST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
"""How long a worker that keeps dying by itself stays away, so that it does not take the machine with it."""
STEADY_S = 60.0
"""How long it has to live for an earlier death to be forgotten."""


class Recall:
    """Starts the worker, again and again if it must be, with pauses that grow as long as it ends itself and achieves nothing."""

    def __init__(self, backend: Backend, models: ServedModels, health: Health) -> None:
        self._backend = backend
        self._models = models
        self._health = health
        self._deaths_in_a_row = 0
        self._died_at = float("-inf")
        self._loading: Future[None] | None = None
        self.due: float | None = None
        """When the worker is to be started again; None while it is there."""

    def start(self) -> None:
        """Start the worker for the first time."""
        try:
            self._backend.start()
        except WorkerDied as death:
            raise SetupError(f"the worker process did not start: {death.reason}.") from death

    def load_all(self) -> Future[None]:
        """Have every served model in memory before anything else happens; from any thread."""
        self._health.starting("models are being loaded")
        loading: Future[None] = Future()
        self._loading = loading
        return loading

    def stop(self) -> None:
        """Let whoever waits for the models go without them."""
        if self._loading is not None:
            self._loading.cancel()

    def died(self, death: WorkerDied, now: float) -> None:
        """Note that the worker is gone."""
        for base in self._models.bases:
            base.left_memory()
        if now - self._died_at > STEADY_S:
            self._deaths_in_a_row = 0
        self._died_at = now
        pause = 0.0
        if self._deaths_in_a_row:
            pause = min(SHORTEST_PAUSE_S * 2 ** (self._deaths_in_a_row - 1), LONGEST_PAUSE_S)
        self._deaths_in_a_row += death.own_fault
        self.due = now + pause
        logger.error("the worker died: %s; it is started again in %.1f s", death.reason, pause)
        self._health.trouble(SUBJECT, f"the worker died ({death.reason}) and is being started again")

    def worked(self) -> None:
        """Note that the worker has achieved something."""
        self._deaths_in_a_row = 0

    def worker_is_there(self, now: float) -> bool:
        """Whether something can be computed; starts the worker and loads its models if it is time. :class:`WorkerDied` if it is gone."""
        if self.due is not None:
            if now < self.due:
                return False
            self._backend.start()
            self.due = None
            self._load_again()
            self._health.fine(SUBJECT)
            logger.info("the worker is back")
        self._backend.check()
        if self._loading is not None:
            self._load_all(self._loading)
        return True

    def _load_again(self) -> None:
        for base in self._models.bases:
            if base.loaded:
                try:
                    base.load()
                except WorkerDied:
                    raise
                except Exception as error:  # noqa: BLE001 -- the operations that need it will say so
                    logger.warning("the model %s cannot be loaded again: %s", base.source, error)

    def _load_all(self, loading: Future[None]) -> None:
        try:
            for base in self._models.bases:
                base.load()
        except WorkerDied:
            raise  # it is tried again when the worker is back
        except Exception as error:  # noqa: BLE001 -- handed to whoever waits
            self._loading = None
            loading.set_exception(error)
        else:
            self._loading = None
            self._health.started()
            loading.set_result(None)
