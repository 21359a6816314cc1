"""Makes the backends of an engine's lanes; those that the configuration does not name need not be importable."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tinkex.engine.lanes.interface import Backend
from tinkex.engine.lanes.roles import LaneSpec, elastic_specs, lane_config, lane_specs, reserved_by

if TYPE_CHECKING:
    from tinkex.engine.config import EngineConfig
    from tinkex.engine.lanes.ray_cluster import RayCluster
    from tinkex.engine.model.progress import Progress


class LaneBackends:
    """Makes a backend per lane; ``wake`` is called when a worker has exited, ``note`` with what is wrong with one.

    Example:
        >>> backends = LaneBackends(config, None, wake=loop.wake, note=health.note)
        >>> backend = backends.make(LaneSpec("lane-0", Role.BOTH))
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None,
        wake: Callable[[], None],
        note: Callable[[str, str | None], None],
    ) -> None:
        self._config = config
        self._progress = progress
        self._wake = wake
        self._note = note
        self._cluster: RayCluster | None = None

    def make(self, spec: LaneSpec) -> Backend:
        """Returns the backend of a lane; the first one on a cluster joins it."""
        config = lane_config(self._config, spec)
        if config.worker == "thread":
            from tinkex.engine.lanes.in_process import LocalBackend

            return LocalBackend(config, self._progress)
        from tinkex.engine.lanes.remote import Callbacks

        callbacks = Callbacks(self._progress, self._wake, partial(self._note, f"silence {spec.name}"))
        if config.worker == "ray":
            from tinkex.engine.lanes.ray_backend import RayBackend
            from tinkex.engine.lanes.ray_cluster import Place, RayCluster

            if self._cluster is None:
                needed = [reserved_by(self._config, each) for each in lane_specs(self._config)]
                elastic = [reserved_by(self._config, each) for each in elastic_specs(self._config)]
                self._cluster = RayCluster(config.ray_address, needed, elastic)
            place = Place(self._cluster, spec, reserved_by(self._config, spec))
            return RayBackend(place, config, callbacks)
        from tinkex.engine.lanes.worker_process import ProcessBackend

        return ProcessBackend(config, callbacks)

    def close(self) -> None:
        """Leave the cluster, if one was joined, after the backends are closed."""
        if self._cluster is not None:
            self._cluster.close()
