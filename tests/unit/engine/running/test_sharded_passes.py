"""The shards of one pass: who computes which, whatever becomes of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tinkex.engine.lanes.interface import PassJob, PassReport, WorkerLost
from tinkex.engine.running.sharded_passes import (
    MAX_GRADIENT_BYTES,
    RunAdapter,
    ShardedPass,
    ShardExchange,
    ShardPlan,
)
from tinkex.engine.trainer.shards import ShardResult
from tinkex.errors import EngineFailure, NumericalError
from tinkex.types import ForwardBackwardOutput

OUTPUT = ForwardBackwardOutput("CrossEntropyLossReturn", [], {})
DONE = ShardResult(OUTPUT, np.zeros(2, np.float32), 1)
OUT_OF_MEMORY = ShardResult(EngineFailure("it needs more memory"), None, 0)
NOT_FINITE = ShardResult(NumericalError("the loss is nan"), None, 0)


class Home:
    """A home trainer that records what it is asked for; ``during`` is called while it computes a shard."""

    def __init__(self, during: Callable[[int], None] = lambda _: None) -> None:
        self.during = during
        self.computed: list[int] = []
        self.added: list[int] = []
        self.is_discarded = False

    def begin_shards(self, *_: Any, **__: Any) -> None:
        pass

    def compute_shard(self, number: int) -> bool:
        self.during(number)
        self.computed.append(number)
        return True

    def add_shard(self, number: int, result: ShardResult) -> None:
        assert result is DONE
        self.added.append(number)

    def end_shards(self) -> PassReport:
        return PassReport(b"", 0, 0, 0)

    def discard_shards(self) -> None:
        self.is_discarded = True


def pass_on(home: Home, num_shards: int, *, adapter_bytes: int = 8) -> ShardedPass:
    adapter = RunAdapter(None, "run/1", adapter_bytes)  # type: ignore[arg-type]  # no model is loaded
    plan = ShardPlan([[n] for n in range(num_shards)], threads=1)
    return ShardedPass(home, adapter, PassJob("run", "ppo", [], backward=True), plan, share_prefixes=True)  # type: ignore[arg-type]  # its methods


def run(
    home: Home, num_shards: int, help_with: Callable[[ShardedPass, int], None], **more: Any
) -> tuple[PassReport | None, Sequence[int]]:
    """Runs a pass; ``help_with`` is called at the beginning of every shard that the home trainer computes."""
    sharded = pass_on(home, num_shards, **more)
    home.during = lambda number: help_with(sharded, number)
    return sharded.run(ShardExchange(lambda: None)), sorted([*home.computed, *home.added])


def test_shards_that_nobody_takes_are_computed_in_order() -> None:
    home = Home()
    report, done = run(home, 4, lambda sharded, number: None)
    assert report is not None
    assert home.computed == done == [0, 1, 2, 3]


def test_every_shard_counts_once() -> None:
    def help_once(sharded: ShardedPass, number: int) -> None:
        taken = sharded.take()
        if taken is not None:
            sharded.complete(taken, DONE)

    home = Home()
    report, done = run(home, 5, help_once)
    assert report is not None
    assert done == [0, 1, 2, 3, 4]
    assert home.computed == [0, 2, 4]


@pytest.mark.parametrize("result", [None, OUT_OF_MEMORY])
def test_a_shard_that_comes_back_is_not_given_to_another(result: ShardResult | None) -> None:
    taken: list[int] = []

    def fail(sharded: ShardedPass, number: int) -> None:
        if (shard := sharded.take()) is not None:
            taken.append(shard)
            if result is None:
                sharded.give_back(shard)
            else:
                sharded.complete(shard, result)

    home = Home()
    _, done = run(home, 4, fail)
    assert done == home.computed == [0, 1, 2, 3]
    assert len(taken) == len(set(taken))


def test_a_shard_that_fails_ends_the_pass_without_a_report() -> None:
    def fail(sharded: ShardedPass, number: int) -> None:
        shard = sharded.take()
        assert shard is not None
        sharded.complete(shard, NOT_FINITE)

    home = Home()
    report, _ = run(home, 4, fail)
    assert report is None
    assert home.is_discarded
    assert home.computed == [0]


@pytest.mark.slow  # it is waited for, for a while
def test_a_late_shard_is_computed_once_more_and_its_return_changes_nothing() -> None:
    taken: list[int] = []

    def take_and_return_late(sharded: ShardedPass, number: int) -> None:
        if number == 0:
            taken.extend([shard for _ in range(2) if (shard := sharded.take()) is not None])
        elif number == taken[0]:  # the home trainer computes it, because it is late
            sharded.give_back(number)
            sharded.complete(taken[1], DONE)

    home = Home()
    report, done = run(home, 3, take_and_return_late)
    assert report is not None
    assert done == [0, 1, 2]
    assert home.added == [2]


def test_results_after_the_end_are_ignored() -> None:
    home = Home()
    sharded = pass_on(home, 2)
    assert sharded.run(ShardExchange(lambda: None)) is not None
    assert sharded.take() is None
    sharded.complete(1, DONE)
    sharded.give_back(1)
    assert not sharded.has_open
    assert home.added == []


def test_few_gradients_exist_at_a_time() -> None:
    far: list[int | None] = []

    def take_many(sharded: ShardedPass, number: int) -> None:
        if number == 0:
            far.extend(sharded.take() for _ in range(4))
            for shard in far:
                if shard is not None:
                    sharded.complete(shard, DONE)

    _, done = run(Home(), 6, take_many, adapter_bytes=MAX_GRADIENT_BYTES // 3)
    assert far == [1, 2, None, None], "three at a time, the one that the home trainer computes included"
    assert done == list(range(6))


def test_a_home_trainer_that_is_lost_takes_its_pass_with_it() -> None:
    def lose(_: int) -> None:
        raise WorkerLost("it was terminated by SIGKILL", own_fault=False)

    exchange = ShardExchange(lambda: None)
    sharded = pass_on(Home(lose), 3)
    with pytest.raises(WorkerLost):
        sharded.run(exchange)
    assert exchange.find() is None
    assert sharded.take() is None
