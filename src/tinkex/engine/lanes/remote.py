"""What the backends outside of this process have in common: their settings, and the calls that are made there as they are."""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from tinkex.engine.lanes.in_process import LocalBackend
from tinkex.engine.lanes.interface import WorkerStatus

if TYPE_CHECKING:
    from tinkex.engine.config import EngineConfig
    from tinkex.engine.model.progress import Progress

P = ParamSpec("P")
T = TypeVar("T")


def called(
    connection: str, method: Callable[Concatenate[LocalBackend, P], T]
) -> Callable[Concatenate[RemoteBackend, P], T]:
    """The method, called in the worker over a connection."""

    @functools.wraps(method)
    def call(self: RemoteBackend, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self.call(connection, method.__name__, *args, **kwargs)
        return result

    return call


def _cast(
    method: Callable[Concatenate[LocalBackend, P], None],
) -> Callable[Concatenate[RemoteBackend, P], None]:
    """The method, called in the worker without waiting for it."""

    @functools.wraps(method)
    def cast(self: RemoteBackend, /, *args: P.args, **kwargs: P.kwargs) -> None:
        self.cast(method.__name__, *args, **kwargs)

    return cast


@dataclass(frozen=True)
class Callbacks:
    """What a backend reports, on other threads."""

    progress: Progress | None
    """The progress of a download or of loading a model."""
    on_exit: Callable[[], None]
    """The worker has exited."""
    on_silence: Callable[[str | None], None]
    """Its heartbeat is missing, with a description, or is back: None."""


class RemoteBackend(ABC):
    """A backend whose methods are those of a worker elsewhere; see :class:`~tinkex.engine.lanes.in_process.LocalBackend`."""

    def __init__(self, config: EngineConfig, callbacks: Callbacks) -> None:
        self._config = config
        self._callbacks = callbacks
        self._num_started = 0
        self._closed = False

    @abstractmethod
    def call(self, connection: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker's backend over one of the connections."""

    @abstractmethod
    def cast(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of the worker's backend without waiting for it."""

    def _status(self, pid: int | None, state: str, node: str | None = None) -> WorkerStatus:
        return WorkerStatus(pid, state, max(0, self._num_started - 1), node)

    @property
    def _absent(self) -> WorkerStatus:
        """The status while there is no worker."""
        return self._status(None, "restarting" if self._num_started else "starting")

    def _settings(self) -> Mapping[str, Any]:
        """The worker's configuration and log level."""
        values = {each.name: getattr(self._config, each.name) for each in fields(self._config)}
        config = {**values, "models": dict(self._config.models)}
        return {"config": config, "log_level": logging.getLogger("tinkex.engine").getEffectiveLevel()}

    check_loss = called("check", LocalBackend.check_loss)
    create = called("compute", LocalBackend.create)
    run_pass = called("compute", LocalBackend.run_pass)
    resume_pass = called("compute", LocalBackend.resume_pass)
    begin_shards = called("compute", LocalBackend.begin_shards)
    compute_shard = called("compute", LocalBackend.compute_shard)
    add_shard = called("compute", LocalBackend.add_shard)
    end_shards = called("compute", LocalBackend.end_shards)
    copy_adapter = called("write", LocalBackend.copy_adapter)
    keep_copy = called("compute", LocalBackend.keep_copy)
    run_shard = called("compute", LocalBackend.run_shard)
    capture = called("compute", LocalBackend.capture)
    forget = _cast(LocalBackend.forget)
    keep_adapter = _cast(LocalBackend.keep_adapter)
    drop_adapter = _cast(LocalBackend.drop_adapter)
    discard_shards = _cast(LocalBackend.discard_shards)
    drop_copy = _cast(LocalBackend.drop_copy)
