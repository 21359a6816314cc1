"""Datums of a run that begin alike are computed together, and what was sent and computed is counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.engine.durability.test_replay import group, running, turns
from tests.unit.engine.test_engine import Caller, forward_backward
from tinkex._wire import proto as wire_proto
from tinkex.engine.api.metrics import metrics_text
from tinkex.engine.api.request_metrics import RequestMetrics
from tinkex.engine.store import UsageKind
from tinkex.types import Datum

SENT = 23 + 24 + 25
DISTINCT = 20 + 3 + 4 + 5
"""The tokens of three answers to one prompt of 20 tokens."""


@pytest.fixture(scope="module", params=[True, False], ids=["shared", "not shared"])
def sharing(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[bool, Caller]]:
    settings = {"prefix_sharing": request.param, "max_tokens_per_pass": 90}
    with running(tmp_path_factory.mktemp("home"), tiny_model, **settings) as ada:
        yield request.param, ada


def logprobs(output: Any) -> list[np.ndarray]:
    return [each["logprobs"].to_numpy() for each in output.loss_fn_outputs]


def tokens_of(ada: Caller, run: str) -> list[tuple[int, int]]:
    """The tokens sent and computed of every ended operation of a run."""
    rows = ada.engine.store.finished.of_session(ada.session)
    return [(row.num_tokens, row.tokens_computed) for row in rows if row.target == run and row.num_tokens]


@pytest.mark.slow
def test_usage_counts_what_was_sent_and_shows_what_was_computed(sharing: tuple[bool, Caller]) -> None:
    shared, ada = sharing
    before = ada.engine.stats().used
    run = ada.create(1)
    ada.run(forward_backward(run, 1, data=group(1, 3)))
    computed = DISTINCT if shared else SENT
    assert tokens_of(ada, run) == [(SENT, computed)]
    used = ada.engine.stats().used
    assert used[UsageKind.TRAINING] - before[UsageKind.TRAINING] == SENT
    assert used[UsageKind.TRAINING_COMPUTED] - before[UsageKind.TRAINING_COMPUTED] == computed
    text = metrics_text(ada.engine.stats(), RequestMetrics(), "1")
    assert f'tinkex_tokens_total{{what="trained_computed"}} {used[UsageKind.TRAINING_COMPUTED]}' in text


@pytest.mark.slow
def test_chunks_that_are_queued_together_are_computed_together(sharing: tuple[bool, Caller]) -> None:
    shared, ada = sharing
    run, alone = ada.create(2, seed=5), ada.create(3, seed=5)
    chunks: list[list[Datum]] = [group(n, 3) for n in (1, 2, 3)]
    with ada.engine.paused():
        ids = [ada.submit(forward_backward(run, n, data=data)) for n, data in enumerate(chunks, 1)]
    for request_id in ids:
        assert not ada.outcome(request_id).error
    outputs = [ada.run(forward_backward(alone, n, data=data)) for n, data in enumerate(chunks, 1)]
    own = [[e for e in turn if e.run_id == run and e.seq_id > 0] for turn in turns(ada)]
    sizes = sorted(len(turn) for turn in own if turn)
    if shared:  # 20 + 3 · 12 tokens fit into one pass
        assert sizes == [3]
        assert tokens_of(ada, run) == [(SENT, DISTINCT), (SENT, 12), (SENT, 12)]
    else:
        assert sizes == [1, 1, 1]
        assert tokens_of(ada, run) == [(SENT, SENT)] * 3
    assert tokens_of(ada, alone) == [(SENT, DISTINCT if shared else SENT)] * 3
    for request_id, expected in zip(ids, outputs, strict=True):
        output = wire_proto.decode_forward_backward_output(ada.outcome(request_id).result)
        for mine, theirs in zip(logprobs(output), logprobs(expected), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.slow
def test_what_is_refused_is_refused_in_the_same_words(sharing: tuple[bool, Caller]) -> None:
    _, ada = sharing
    run = ada.create(4)
    data = group(1, 2)
    bad = Datum(data[1].model_input, {"target_tokens": [1]})
    with pytest.raises(Exception, match=r"data\[1\].loss_fn_inputs\['target_tokens'\] has shape \(1,\)"):
        ada.submit(forward_backward(run, 1, data=[data[0], bad]))
