"""The lanes of an engine: how many there are, and what each is for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Flag, auto

from tinkex.engine.config import EngineConfig


class Role(Flag):
    """What a lane is for."""

    TRAIN = auto()
    SAMPLE = auto()
    BOTH = TRAIN | SAMPLE


@dataclass(frozen=True)
class LaneSpec:
    """The name of a lane, which stays the same over restarts, and its role."""

    name: str
    role: Role


def lane_specs(config: EngineConfig) -> Sequence[LaneSpec]:
    """The lanes that a configuration asks for: trainers, which also sample if there are no samplers, and samplers.

    >>> [spec.name for spec in lane_specs(EngineConfig(trainers=1, samplers=2))]
    ['trainer-0', 'sampler-0', 'sampler-1']
    >>> lane_specs(EngineConfig())
    [LaneSpec(name='lane-0', role=<Role.BOTH: 3>)]
    """
    if config.trainers == 1 and not config.samplers:
        return [LaneSpec("lane-0", Role.BOTH)]
    role = Role.TRAIN if config.samplers else Role.BOTH
    trainers = [LaneSpec(f"trainer-{number}", role) for number in range(config.trainers)]
    return [*trainers, *(LaneSpec(f"sampler-{number}", Role.SAMPLE) for number in range(config.samplers))]


def lane_config(config: EngineConfig) -> EngineConfig:
    """The configuration of one of several lanes: its share of the machine's cores and of the memory of runs.

    >>> lane_config(EngineConfig(trainers=2, max_live_bytes=1000)).max_live_bytes
    500
    """
    num_lanes = config.trainers + config.samplers
    if num_lanes == 1:
        return config
    threads = config.threads or max((os.cpu_count() or 1) // num_lanes, 1)
    max_live_runs = config.max_live_runs
    return replace(
        config,
        threads=threads,
        max_live_bytes=max(config.live_bytes_limit // config.trainers, 1),
        max_live_runs=max(max_live_runs // config.trainers, 1) if max_live_runs is not None else None,
    )
