"""The lanes of an engine: how many there are, and what each is for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Flag, auto

from tinkex.engine.config import EngineConfig, parse_resources


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
    is_elastic: bool = field(default=False, repr=False)
    """Whether it is there only while it is needed."""


def lane_specs(config: EngineConfig) -> Sequence[LaneSpec]:
    """The lanes that a configuration always has: trainers, which also sample if there are no samplers, and samplers.

    >>> [spec.name for spec in lane_specs(EngineConfig(trainers=1, samplers=2))]
    ['trainer-0', 'sampler-0', 'sampler-1']
    >>> lane_specs(EngineConfig())
    [LaneSpec(name='lane-0', role=<Role.BOTH: 3>)]
    """
    if num_lanes(config) == 1:
        return [LaneSpec("lane-0", Role.BOTH)]
    role = Role.TRAIN if config.most_samplers else Role.BOTH
    trainers = [LaneSpec(f"trainer-{number}", role) for number in range(config.trainers)]
    return [*trainers, *(LaneSpec(f"sampler-{n}", Role.SAMPLE) for n in range(config.fewest_samplers))]


def elastic_specs(config: EngineConfig) -> Sequence[LaneSpec]:
    """The samplers that there are only while they are needed.

    >>> [spec.name for spec in elastic_specs(EngineConfig(min_samplers=1, max_samplers=3))]
    ['sampler-1', 'sampler-2']
    """
    numbers = range(config.fewest_samplers, config.most_samplers)
    return [LaneSpec(f"sampler-{number}", Role.SAMPLE, is_elastic=True) for number in numbers]


def num_lanes(config: EngineConfig) -> int:
    """The most lanes that there can be.

    >>> num_lanes(EngineConfig(trainers=2, max_samplers=4))
    6
    """
    return config.trainers + config.most_samplers


def lane_config(config: EngineConfig, spec: LaneSpec) -> EngineConfig:
    """The configuration of a lane: its threads, and its share of the memory of runs.

    Several lanes of one machine divide its cores. On a cluster a lane has as many threads as it reserves CPUs.

    >>> config = EngineConfig(trainers=2, samplers=1, threads=1, max_live_bytes=1000)
    >>> lane_config(config, LaneSpec("trainer-0", Role.TRAIN)).max_live_bytes
    500
    """
    if num_lanes(config) == 1 and config.worker != "ray":
        return config
    reserved = resources_of(config, spec).get("CPU", 0) if config.worker == "ray" else 0
    threads = config.threads or int(reserved) or max((os.cpu_count() or 1) // num_lanes(config), 1)
    max_live_runs = config.max_live_runs
    return replace(
        config,
        threads=threads,
        max_live_bytes=max(config.live_bytes_limit // config.trainers, 1),
        max_live_runs=max(max_live_runs // config.trainers, 1) if max_live_runs is not None else None,
    )


def resources_of(config: EngineConfig, spec: LaneSpec) -> Mapping[str, float]:
    """What a lane reserves on its node of a cluster, as far as the configuration says it.

    >>> resources_of(EngineConfig(sampler_resources="CPU=2,GPU=1"), LaneSpec("sampler-0", Role.SAMPLE))
    {'CPU': 2.0, 'GPU': 1.0}
    """
    is_trainer = Role.TRAIN in spec.role
    return parse_resources(config.trainer_resources if is_trainer else config.sampler_resources)


def reserved_by(config: EngineConfig, spec: LaneSpec) -> Mapping[str, float]:
    """What a lane reserves on its node: a CPU for each of its threads, and what the configuration says.

    >>> reserved_by(EngineConfig(worker="ray", threads=2), LaneSpec("lane-0", Role.BOTH))
    {'CPU': 2.0}
    """
    return {"CPU": float(lane_config(config, spec).threads or 1), **resources_of(config, spec)}
