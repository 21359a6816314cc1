"""Random programs on a server that is killed at random moments; hundreds of kills are run by hand.

``python -m tests.durability.kill_rounds --rounds 300`` does the same for longer, and says how far it is.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.durability import kill_rounds
from tests.durability.execution import Execution, differences
from tests.durability.kill_rounds import Tally
from tests.durability.programs import DIALECTS, KINDS, make_program


@pytest.mark.slow
@pytest.mark.timeout(900)  # servers start slowly on a busy machine
@pytest.mark.parametrize(
    ("exact", "seed", "concurrency", "arms", "more", "on_ray"),
    [
        (True, 11, 3, kill_rounds.ARMS, (), False),
        (False, 12, 2, kill_rounds.ARMS, (), False),
        (True, 13, 3, kill_rounds.POOL_ARMS, kill_rounds.POOL, False),
        (True, 14, 3, kill_rounds.RAY_ARMS, kill_rounds.POOL, True),
        (True, 15, 3, kill_rounds.POOL_ARMS, kill_rounds.ELASTIC, False),
        (True, 16, 2, ("api",), ("--worker", "thread"), False),
    ],
    ids=["alone", "packed", "pool", "ray", "elastic", "thread"],
)
def test_random_programs_give_the_same_results_when_the_server_is_killed(
    tiny_model: Path,
    tmp_path: Path,
    exact: bool,
    seed: int,
    concurrency: int,
    arms: tuple[str, ...],
    more: tuple[str, ...],
    on_ray: bool,
) -> None:
    """One run per pass is bitwise reproducible. In shared passes two executions differ by rounding; a replay must still
    repeat each pass exactly, which the engine verifies."""
    tally = Tally()
    asyncio.run(
        kill_rounds.play(
            tmp_path,
            tiny_model,
            kills=6,
            seed=seed,
            exact=exact,
            tally=tally,
            concurrency=concurrency,
            kills_each=5,
            arms=arms,
            more=more,
            on_ray=on_ray,
        )
    )
    assert not tally.failures, "\n".join([*tally.failures, (tmp_path / "serve.log").read_text()[-4000:]])
    assert tally.kills.total() == 6
    assert tally.operations > 50


def test_programs_use_every_operation_and_are_determined_by_their_seed() -> None:
    programs = [make_program(seed) for seed in range(30)]
    assert programs == [make_program(seed) for seed in range(30)]
    kinds = {step.kind for program in programs for run in program.runs for step in run.steps}
    assert kinds == KINDS.keys() - {"chunks"}
    assert {program.dialect for program in programs} == {*DIALECTS}


def test_a_difference_in_the_last_bit_is_detected() -> None:
    weights = np.ones(3, np.float32)
    nearly = np.nextafter(weights, np.float32(2))
    ran = ("pass", {"loss:sum": 1.0}, [weights])
    expected = Execution("one", {(0, 1): ran}, {0: {"w": weights}}, {0: ["weights/end"]})
    assert not differences(
        expected, Execution("two", {(0, 1): ran}, {0: {"w": weights}}, {0: ["weights/end"]}), exact=True
    )
    others = [
        Execution(
            "two", {(0, 1): ("pass", {"loss:sum": 1.0}, [nearly])}, expected.weights, expected.checkpoints
        ),
        Execution(
            "two", {(0, 1): ("pass", {"loss:sum": 1.1}, [weights])}, expected.weights, expected.checkpoints
        ),
        Execution("two", {(0, 1): ("failed", "server")}, expected.weights, expected.checkpoints),
        Execution("two", {}, expected.weights, expected.checkpoints),
        Execution("two", expected.results, {0: {"w": nearly}}, expected.checkpoints),
        Execution("two", expected.results, expected.weights, {0: []}),
    ]
    for other in others:
        assert len(differences(expected, other, exact=True)) == 1
