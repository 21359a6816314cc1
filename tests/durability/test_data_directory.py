"""A data directory of an earlier version opens, and what was queued in it completes with the numbers it would have had.

``data/data-directory-0.1.0.tar.xz`` was written by Tinkex 0.1.0 and left by a killed process. It holds two runs that shared passes, with
savepoints and a journal since them; a checkpoint with optimizer state, sampler weights and an unnamed snapshot; and queued
operations: passes, steps, a save, a load, an operation behind a gap, two runs that are yet to be created (one from the checkpoint),
and three samples. ``expected.json`` has what 0.1.0 itself computed for them.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.durability.test_replay import data, running
from tests.unit.engine.test_engine import Caller, forward_backward, optim_step
from tinkex._wire import json as wire_json
from tinkex._wire import proto as wire_proto
from tinkex.engine.store import Outcome

ARCHIVE = Path(__file__).parent / "data" / "data-directory-0.1.0.tar.xz"


@pytest.fixture(params=["thread", pytest.param("process", marks=pytest.mark.slow)])
def ada(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Iterator[Caller]:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    with running(tmp_path, tiny_model, savepoint_after_operations=4, worker=request.param) as caller:
        yield caller


def decoded(kind: str, outcome: Outcome) -> dict[str, Any]:
    assert not outcome.error
    if kind == "pass":
        output = wire_proto.decode_forward_backward_output(outcome.result)
        logprobs = [each["logprobs"].to_numpy().tolist() for each in output.loss_fn_outputs]
        return {"metrics": dict(output.metrics), "logprobs": logprobs}
    if kind == "sample":
        response = wire_proto.decode_sample_response(outcome.result, ["?"] * 2)
        return {
            "sequences": [
                {"tokens": list(each.tokens), "logprobs": list(each.logprobs or [])}
                for each in response.sequences
            ]
        }
    return {"value": wire_json.decode_any(outcome.result)}


def assert_close(found: Any, expected: Any, where: str) -> None:
    """Equal, with numbers up to the rounding of another processor."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_close(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for index, item in enumerate(expected):
            assert_close(found[index], item, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-3), where
    else:
        assert found == expected, where


def test_what_0_1_0_had_queued_completes_with_its_numbers(ada: Caller, tmp_path: Path) -> None:
    facts = json.loads((tmp_path / "expected.json").read_text())
    a, b = facts["runs"]["a"], facts["runs"]["b"]
    ada.submit(optim_step(a, 15))  # fills the gap that operation 16 waits for
    for queued in facts["queued"]:
        outcome = ada.outcome(queued["request_id"])
        assert_close(decoded(queued["kind"], outcome), facts["expected"][queued["name"]], queued["name"])
    for run, name, seq_id in ((a, "next loss of a", 17), (b, "next loss of b", 13)):
        outcome = ada.outcome(ada.submit(forward_backward(run, seq_id, forward_only=True, data=data(99))))
        assert_close(decoded("pass", outcome), facts["expected"][name], name)
    assert ada.engine.health.status == "ok"
