"""Structured outputs at intake: checked before anything is recorded, and not on the event loop."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.durability.test_replay import running
from tests.unit.engine.test_engine import sample
from tinkex._wire import json as wire_json
from tinkex.errors import InvalidInput
from tinkex.types import SampleRequest, SamplingParams, StructuredOutput

pytestmark = pytest.mark.slow


def constrained(sampler: str, seq_id: int | None = None, **wanted: Any) -> SampleRequest:
    params = SamplingParams(max_tokens=60, seed=1, structured_output=StructuredOutput(**wanted))
    return sample(sampler, seq_id, sampling_params=params)


def test_what_is_rejected_is_not_recorded_and_what_is_repeated_is_found(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running(tmp_path, tiny_model) as ada:
        sampler = ada.sampler(base_model="tiny")
        ada.run(sample(sampler))  # loads the model
        with pytest.raises(InvalidInput, match="unclosed group"):
            ada.submit(constrained(sampler, 1, regex="(a"))
        assert ada.engine.store.futures.find_by_seq_id(sampler, 1) is None
        accepted = ada.submit(constrained(sampler, 1, regex="a"))
        assert ada.submit(constrained(sampler, 1, regex="a")) == accepted
        with pytest.raises(InvalidInput, match="number 1"):
            ada.submit(constrained(sampler, 1, regex="b"))
        assert not ada.outcome(accepted).error


def test_a_grammar_is_compiled_on_a_thread_for_long_jobs(tiny_model: Path, tmp_path: Path) -> None:
    of_other_engines = set(threading.enumerate())

    def compilers() -> list[threading.Thread]:
        started = set(threading.enumerate()) - of_other_engines
        return [thread for thread in started if "tinkex-user" in thread.name]

    with running(tmp_path, tiny_model) as ada:
        sampler = ada.sampler(base_model="tiny")
        ada.run(sample(sampler))
        assert not compilers()
        request = constrained(sampler, json_schema={"enum": [1, 2]})
        accepted = asyncio.run(ada.engine.accept(ada.owner, request, wire_json.encode(request)))
        assert len(compilers()) == 1
        assert not ada.outcome(accepted.request_id).error
        invalid = constrained(sampler, json_schema={"uniqueItems": True})
        with pytest.raises(InvalidInput, match="uniqueItems"):
            asyncio.run(ada.engine.accept(ada.owner, invalid, wire_json.encode(invalid)))
    assert not compilers()


def test_on_a_model_that_is_not_loaded_yet_the_sample_fails_with_the_same_error(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running(tmp_path, tiny_model) as ada:
        sampler = ada.sampler(base_model="tiny")
        rejected = ada.submit(constrained(sampler, regex="(a"))
        valid = ada.submit(constrained(sampler, regex="a"))
        assert "structured_output.regex" in (ada.outcome(rejected).error or "")
        assert not ada.outcome(valid).error
