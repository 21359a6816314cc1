"""Waiting operations: bounded in bytes, on disk until their turn comes, and no larger in memory after a restart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard

from tests.unit.engine.durability.test_replay import data, running, state_of, train
from tests.unit.engine.test_engine import Caller, forward_backward, optim_step, sample
from tinkex.engine.encoding import compact, encode_request
from tinkex.errors import Busy, OverQuota
from tinkex.types import Datum, ModelInput, SamplingParams

MIB = 2**20
NOTHING = {"max_pending_bytes_in_memory": 1}
"""Settings under which every request is read from disk again."""


RESTART = """
import sys
from tests.unit.engine.intake.test_pending_bytes import rss
from tests.unit.engine.test_engine import Path, config
from tinkex.engine.engine import Engine

engine = Engine(config(Path(sys.argv[1]), Path(sys.argv[2])))
before = rss()
engine.start()
print(sum(engine.stats().operations.values()), rss() - before)
engine.close()
"""


def rss() -> int:
    """The resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_numbers_are_the_same_when_requests_are_read_from_disk(tiny_model: Path, tmp_path: Path) -> None:
    states, tokens = [], []
    for name, settings in (("memory", {}), ("disk", NOTHING)):
        with running(tmp_path / name, tiny_model, **settings) as ada:
            run = ada.create()
            train(ada, run, range(1, 6))
            states.append(state_of(ada, run, 6))
            drawn = sample(
                ada.sampler(base_model="tiny"), sampling_params=SamplingParams(max_tokens=4, seed=1)
            )
            tokens.append(list(ada.run(drawn).sequences[0].tokens))
    assert states[0] == states[1]
    assert tokens[0] == tokens[1]


def test_a_body_that_was_sent_compressed_is_recorded_and_read_in_that_form(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running(tmp_path, tiny_model, **NOTHING) as ada:
        run = ada.create()
        request = forward_backward(run, 1, data=data(1) * 50)
        body = encode_request(request)
        sent = zstandard.compress(body)
        submitted = ada.engine.submit(ada.owner, request, compact(body, sent, "zstd"))
        assert not ada.outcome(submitted.request_id).error
        row = ada.engine.store.journal.get(submitted.request_id)
        assert row is not None
        assert len(row.body) < len(sent) + 64 < len(body)
        expected = state_of(ada, run, 2)
    with running(tmp_path, tiny_model) as ada:
        assert state_of(ada, run, 3) == expected, "a replay reads it too"


def test_bytes_of_waiting_operations_are_bounded_per_user(tiny_model: Path, tmp_path: Path) -> None:
    size = len(encode_request(optim_step("s:train:0", 2)))
    with running(tmp_path, tiny_model, max_pending_bytes_per_user=4 * size) as ada:
        run = ada.create()
        waiting = [ada.submit(optim_step(run, number)) for number in range(2, 6)]
        with pytest.raises(OverQuota, match=f"have {4 * size} bytes, this one has {size}"):
            ada.submit(optim_step(run, 6))
        bob = Caller(ada.engine, owner="bob", session="b")
        bob.run(sample(bob.sampler(base_model="tiny")))
        for accepted in (ada.submit(forward_backward(run, 1)), *waiting):
            assert not ada.outcome(accepted).error
        ada.run(optim_step(run, 6))


def test_bytes_of_waiting_operations_are_bounded_for_all_users(tiny_model: Path, tmp_path: Path) -> None:
    size = len(encode_request(optim_step("s:train:0", 2)))
    with running(tmp_path, tiny_model, max_pending_bytes=2 * size) as ada:
        run = ada.create()
        bob = Caller(ada.engine, owner="bob", session="b")
        other = bob.create()
        waiting = [ada.submit(optim_step(run, number)) for number in (2, 3)]
        with pytest.raises(Busy, match="of all users") as raised:
            bob.submit(optim_step(other, 1))
        assert not isinstance(raised.value, OverQuota)
        for accepted in (ada.submit(forward_backward(run, 1)), *waiting):
            assert not ada.outcome(accepted).error
        bob.run(optim_step(other, 1))


def test_a_request_that_cannot_be_read_again_fails_alone(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model, **NOTHING) as ada:
        run = ada.create()
        waiting = {number: ada.submit(optim_step(run, number)) for number in (2, 3)}
        with ada.engine.store.database.transaction() as execute:
            execute("UPDATE journal SET body = x'00' WHERE request_id = ?", (waiting[2],))
        ada.run(forward_backward(run, 1))
        assert "cannot be read from the server's disk" in ada.outcome(waiting[2]).error
        assert not ada.outcome(waiting[3]).error
        expected = state_of(ada, run, 4)
    with running(tmp_path, tiny_model) as ada:
        assert state_of(ada, run, 5) == expected


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_waiting_operations_take_little_memory_also_after_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(5, 200, 61).tolist()
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    with running(tmp_path, tiny_model, max_pending_bytes_in_memory=8 * MIB) as ada:
        run = ada.create()
        ada.run(forward_backward(run, 1, data=[datum] * 1000, forward_only=True))
        before = rss()
        for number in range(3, 63):
            ada.submit(forward_backward(run, number, data=[datum] * 1000))
        assert rss() - before < 48 * MIB
    restarted = subprocess.run(
        [sys.executable, "-c", RESTART, str(tmp_path), str(tiny_model)],
        capture_output=True,
        text=True,
        check=True,
    )
    num_operations, growth = map(int, restarted.stdout.split())
    assert num_operations == 60
    assert growth < 48 * MIB
