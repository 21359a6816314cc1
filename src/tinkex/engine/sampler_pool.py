"""The samplers whose number follows the load: which are added, which are removed, and when."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from tinkex.engine.config import EngineConfig
from tinkex.engine.lane_controller import LaneController
from tinkex.engine.lanes.roles import LaneSpec, Role, elastic_specs
from tinkex.engine.running.table import OperationTable
from tinkex.engine.scheduler import Demand, SampleRouter, SamplerScaling

logger = logging.getLogger("tinkex.engine")

CHECK_S = 0.5
"""How often the load is looked at."""


@dataclass(frozen=True)
class SamplerCounts:
    """How many samplers there are, by what they do, and between which limits."""

    running: int
    starting: int
    draining: int
    """Those that finish their samples and are then removed."""
    fewest: int
    most: int


class SamplerPool:
    """Adds samplers while samples wait, and removes those that are not needed. Only called on the engine thread, except where noted.

    One that is removed gets no more samples, finishes those that it has, and ends. ``start`` makes the lane of a sampler, and
    has it start in its own thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        table: OperationTable,
        router: SampleRouter,
        start: Callable[[LaneSpec], LaneController],
    ) -> None:
        self._fewest, self._most = config.fewest_samplers, config.most_samplers
        self._table = table
        self._router = router
        self._start = start
        self._specs = {spec.name: spec for spec in elastic_specs(config)}
        self._scaling = SamplerScaling(
            fewest=self._fewest,
            most=self._most,
            places=config.max_decode_batch,
            idle_s=config.sampler_idle_s,
        )
        self._was_refused = False
        self._added: set[str] = set()
        """Those added since there was no room for one, which show that there is again when they run."""
        self._ending: list[threading.Thread] = []
        self.due = 0.0 if self._specs else float("inf")
        """When :meth:`adjust` has something to do next."""

    def adjust(self, lanes: Mapping[str, LaneController], now: float) -> Mapping[str, LaneController]:
        """Returns the lanes that there are from now on: without samplers that have ended, and with new ones."""
        self.due = now + CHECK_S
        self._ending = [thread for thread in self._ending if thread.is_alive()]
        lanes = dict(lanes)
        for name in self._specs.keys() & lanes.keys():
            lane = lanes[name]
            if lane.refused is not None:
                self._refuse(lane.refused, now)
            elif name in self._added and lane.supervisor.is_ready:
                self._was_refused = False
            if lane.refused is not None or (lane.is_draining and lane.is_empty):
                self._remove(lanes.pop(name))
        samplers = [each for each in lanes.values() if Role.SAMPLE in each.role and not each.is_draining]
        wanted = self._scaling.wanted(self._demands(samplers), len(samplers), now)
        if wanted > len(samplers):
            self._add(lanes, wanted - len(samplers))
        elif wanted < len(samplers):
            # Those that have least to finish; of equal ones the last.
            elastic = [each for each in reversed(samplers) if each.name in self._specs]
            elastic.sort(key=lambda each: len(self._table.running_samples(each.name)))
            for each in elastic[: len(samplers) - wanted]:
                each.is_draining = True
        return lanes

    def counts(self, lanes: Collection[LaneController]) -> SamplerCounts | None:
        """How many samplers there are, or None if their number is fixed; safe on any thread."""
        if not self._specs:
            return None
        found: Counter[str] = Counter()
        for each in lanes:
            if Role.SAMPLE in each.role:
                is_running = each.supervisor.is_ready
                found["draining" if each.is_draining else "running" if is_running else "starting"] += 1
        return SamplerCounts(found["running"], found["starting"], found["draining"], self._fewest, self._most)

    def close(self) -> None:
        """Wait until the samplers that were removed have ended; called on any other thread, after the engine thread has ended."""
        for thread in self._ending:
            thread.join()

    def _demands(self, samplers: Collection[LaneController]) -> Collection[Demand]:
        waiting = self._table.waiting_samples()
        decoding: Counter[str] = Counter()
        for each in samplers:
            for source, batch in each.batches.stats.items():
                decoding[source] += batch.num_sequences
        return [Demand(waiting.get(source, 0), decoding[source]) for source in {*waiting, *decoding}]

    def _add(self, lanes: dict[str, LaneController], number: int) -> None:
        for each in [each for each in lanes.values() if each.is_draining][:number]:
            each.is_draining = False
            number -= 1
        for spec in [spec for name, spec in self._specs.items() if name not in lanes][:number]:
            logger.info("samples wait for a place: the sampler %s is added", spec.name)
            lanes[spec.name] = self._start(spec)
            self._router.add(spec.name)
            self._added.add(spec.name)

    def _remove(self, lane: LaneController) -> None:
        logger.info("the sampler %s is removed", lane.name)
        self._router.remove(lane.name)
        self._added.discard(lane.name)
        thread = threading.Thread(target=lane.end, name=f"tinkex-end-{lane.name}", daemon=True)
        self._ending.append(thread)
        thread.start()

    def _refuse(self, reason: str, now: float) -> None:
        self._scaling.refuse(now)
        if not self._was_refused:
            logger.warning("samples wait, and no sampler can be added: %s; it is tried again later", reason)
        self._was_refused = True
        self._added.clear()
