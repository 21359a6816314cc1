"""Where the metrics of a run are also written: experiment trackers, and the server that trains it.

``metrics.jsonl`` in the directory of the run always has them. Each tracker is a package that is imported only if a run names it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tinkex.errors import SetupError, TinkexError, Unsupported
from tinkex.train.loop import TrainingCallback
from tinkex.train.recipes import Metrics

if TYPE_CHECKING:
    from tinkex.clients.training import TrainingClient
    from tinkex.futures import AwaitableConcurrentFuture
    from tinkex.train.settings import Settings
    from tinkex.types import Rollout

__all__ = ["TRACKERS", "CallbackGroup", "ServerRecords", "with_trackers"]

logger = logging.getLogger("tinkex")

PROJECT = "tinkex"
"""The project or experiment that runs belong to, where a tracker has them."""
CLOSING_TIMEOUT_S = 30.0


class Tracker(Protocol):
    """One experiment tracker, opened for one run."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of a step."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TensorBoard:
    """Event files in ``tensorboard/`` of the run's directory: ``tensorboard --logdir run-1``."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportMissingImports]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportMissingImports]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # pyright: ignore[reportMissingImports]

        del settings  # its event files hold numbers; run.toml is beside them
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory / "tensorboard"))

    def log(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of a step."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, in ``wandb/`` of the run's directory and, unless ``WANDB_MODE`` is ``offline``, on its server."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=PROJECT,
            name=directory.name,
            dir=str(directory),
            config=dict(settings),
            reinit="create_new",
        )

    def log(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Trackio:
    """A run of Trackio, in its local database: ``trackio show --project tinkex``."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(project=PROJECT, name=directory.name, config=dict(settings), resume="allow")

    def log(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


class Mlflow:
    """A run of MLflow, on the server or in the store that ``MLFLOW_TRACKING_URI`` names, or in MLflow's default one."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._metric, self._client = Metric, mlflow.MlflowClient()
        experiment = self._client.get_experiment_by_name(PROJECT)
        experiment_id = (
            experiment.experiment_id if experiment is not None else self._client.create_experiment(PROJECT)
        )
        self._run_id = self._client.create_run(experiment_id, run_name=directory.name).info.run_id
        params = [Param(name, str(value)[:500]) for name, value in settings.items()]
        self._client.log_batch(self._run_id, params=params)

    def log(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of a step."""
        now_ms = int(time.time() * 1000)
        values = [self._metric(name, value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=values)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run_id)


TRACKERS: Mapping[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": Mlflow,
}
"""The trackers by the names of their packages."""


class CallbackGroup(TrainingCallback):
    """Passes the progress of a run on to several callbacks.

    >>> class Losses(TrainingCallback):
    ...     def stepped(self, step: int, metrics: Metrics) -> None:
    ...         print(step, metrics["loss"])
    >>> CallbackGroup(Losses(), TrainingCallback()).stepped(1, {"loss": 0.5})
    1 0.5
    """

    def __init__(self, *callbacks: TrainingCallback) -> None:
        self._callbacks = callbacks

    def data_read(self, description: str) -> None:
        """Passes it on."""
        for each in self._callbacks:
            each.data_read(description)

    def created(self, directory: Path) -> None:
        """Passes it on."""
        for each in self._callbacks:
            each.created(directory)

    def working(self, phase: str, done: int, total: int) -> None:
        """Passes it on."""
        for each in self._callbacks:
            each.working(phase, done, total)

    def started(self, total_steps: int, first_step: int, headline: str) -> None:
        """Passes it on."""
        for each in self._callbacks:
            each.started(total_steps, first_step, headline)

    def stepped(self, step: int, metrics: Metrics) -> None:
        """Passes it on."""
        for each in self._callbacks:
            each.stepped(step, metrics)

    def evaluated(self, step: int, metrics: Metrics) -> None:
        """Passes it on."""
        for each in self._callbacks:
            each.evaluated(step, metrics)

    def saved(self, step: int, path: str) -> None:
        """Passes it on."""
        for each in self._callbacks:
            each.saved(step, path)

    def stopping(self, steps: int) -> None:
        """Passes it on."""
        for each in self._callbacks:
            each.stopping(steps)

    def finished(self) -> None:
        """Passes it on."""
        for each in self._callbacks:
            each.finished()

    def closed(self) -> None:
        """Passes it on."""
        for each in self._callbacks:
            each.closed()


class _TrackerCallback(TrainingCallback):
    """Writes the metrics of a run to one tracker. A run goes on without a tracker that fails."""

    def __init__(self, name: str, settings: Settings) -> None:
        self._name, self._settings = name, settings
        self._directory: Path | None = None
        self._tracker: Tracker | None = None

    def created(self, directory: Path) -> None:
        self._directory = directory

    def stepped(self, step: int, metrics: Metrics) -> None:
        self._log(step, metrics)

    def evaluated(self, step: int, metrics: Metrics) -> None:
        self._log(step, evaluation(metrics))

    def closed(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            self._try(tracker.close)

    def _open(self) -> None:
        """Opens the tracker when the run exists on the server; whatever it raises then ends the run before its first step."""
        if self._directory is not None:
            directory, self._directory = self._directory, None
            self._tracker = TRACKERS[self._name](directory, self._settings.as_json())

    def _log(self, step: int, metrics: Metrics) -> None:
        self._open()
        tracker = self._tracker
        if tracker is not None:
            self._try(lambda: tracker.log(step, metrics))

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001 -- whatever the package raises; the run's own files have the metrics
            self._tracker = None
            logger.warning(
                "%s failed, and gets no more metrics of this run; metrics.jsonl has them: %s",
                self._name,
                error,
            )


class ServerRecords(TrainingCallback):
    """Writes metrics and rollouts of a run to the server that trains it, if it stores them; others get nothing."""

    def __init__(self, training: TrainingClient) -> None:
        self._training = training
        self._unsupported: set[str] = set()
        self._writing: deque[AwaitableConcurrentFuture[None]] = deque()

    def stepped(self, step: int, metrics: Metrics) -> None:
        """Logs the metrics of a step."""
        self._write("metrics", lambda: self._training.log_metrics(step, metrics))

    def evaluated(self, step: int, metrics: Metrics) -> None:
        """Logs an evaluation."""
        self.stepped(step, evaluation(metrics))

    def rollouts(self, step: int, rollouts: Callable[[], Sequence[Rollout]]) -> None:
        """Logs what was sampled in a step; ``rollouts`` is called only if the server stores them."""
        self._write("rollouts", lambda: self._training.log_rollouts(step, rollouts()))

    def closed(self) -> None:
        """Waits for what is being written."""
        while self._writing:
            self._check(self._writing.popleft())

    def _write(self, what: str, start: Callable[[], AwaitableConcurrentFuture[None]]) -> None:
        if what in self._unsupported:
            return
        while self._writing and self._writing[0].done():
            self._check(self._writing.popleft())
        try:
            self._writing.append(start())
        except Unsupported:
            self._unsupported.add(what)

    def _check(self, written: AwaitableConcurrentFuture[None]) -> None:
        try:
            written.result(CLOSING_TIMEOUT_S)
        except (TinkexError, TimeoutError) as error:
            logger.warning("the server did not store metrics of this run; metrics.jsonl has them: %s", error)


def evaluation(metrics: Metrics) -> Metrics:
    """Returns the metrics of an evaluation under the names that they have in ``metrics.jsonl``.

    >>> evaluation({"loss": 0.5})
    {'eval_loss': 0.5}
    """
    return {f"eval_{name}": value for name, value in metrics.items()}


def with_trackers(settings: Settings, watcher: TrainingCallback) -> TrainingCallback:
    """Returns a callback that also writes to the trackers of ``settings``; raises ``SetupError`` if one is not installed."""
    from importlib.util import find_spec

    for name in settings.track:
        if find_spec(name) is None:
            raise SetupError(f"--track {name} needs the package {name}; run: pip install {name}")
    if not settings.track:
        return watcher
    return CallbackGroup(watcher, *(_TrackerCallback(name, settings) for name in settings.track))
