"""The official client works while lanes and the server are killed at random: the numbers are those of an undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.durability import kill_rounds
from tests.durability.kill_rounds import Rounds, Tally
from tests.durability.killable import KillableServer
from tests.durability.official_run import EVENTS, run_official
from tests.ray_nodes import ENVIRONMENT, ray_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KILLS = 4
ONE = ("--threads", "1", "--data-parallel-tokens", "24")
LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "thread": ((*ONE, "--worker", "thread"), ("api",)),
    "worker": (ONE, kill_rounds.ARMS),
    "pool": (kill_rounds.POOL, kill_rounds.POOL_ARMS),
    "ray": ((*kill_rounds.POOL, "--ray"), kill_rounds.RAY_ARMS),
}
"""The options of a server, and what is killed. All compute with the same threads and cut passes alike."""


@contextmanager
def started(home: Path, model: Path, options: tuple[str, ...]) -> Iterator[KillableServer]:
    where: dict[str, Any] = {"python": ray_python(), "env": ENVIRONMENT} if "--ray" in options else {}
    with KillableServer(home, model, *options, often=4, deterministic=True, **where) as server:
        yield server


@pytest.fixture(scope="module")
def expected(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The numbers of a server that computes on a thread of its own process, and is not disturbed."""
    with started(tmp_path_factory.mktemp("undisturbed"), tiny_model, LAYOUTS["thread"][0]) as server:
        return run_official(server)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_official_client_sees_a_delay_and_the_same_bits_wherever_they_are_computed(
    tiny_model: Path, tmp_path: Path, expected: Any, layout: str
) -> None:
    options, arms = LAYOUTS[layout]
    with started(tmp_path, tiny_model, options) as server:
        rng, tally = random.Random(21), Tally()
        rounds = Rounds(server, rng, tally, arms)
        moments = rng.sample(range(EVENTS), KILLS)

        def disturb(event: int) -> None:
            if event in moments:
                rounds.kill(rng.choice(arms))

        assert run_official(server, disturb) == expected
        assert tally.kills.total() == KILLS
        server.wait()
        unwanted = [
            line for line in server.log.splitlines() if any(word in line for word in kill_rounds.UNWANTED)
        ]
        assert not unwanted
