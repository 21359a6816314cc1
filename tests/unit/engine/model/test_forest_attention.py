"""Attention over a forest of prefixes: each row attends to its own path, in both directions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models import tiny_llama
from tinkex.engine.model.attention import packed_causal
from tinkex.engine.model.forest_attention import Node, forest_causal
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.transformer import Transformer

pytestmark = pytest.mark.slow

NODES = [
    Node(0, 5, 20),
    Node(5, 8, 8),
    Node(8, 11, 11),
    Node(11, 15, 20),
    Node(15, 17, 17),
    Node(17, 20, 20),
    Node(20, 24, 24),
]
PATHS = [(0, 1), (0, 2), (0, 3, 4), (0, 3, 5), (6,)]


@pytest.fixture(params=[None, 6], ids=["full attention", "a window"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Transformer:
    config = {"sliding_window": request.param}
    return load_transformer(tiny_llama(tmp_path, family="mistral", layers=1, head_dim=8, config=config))


def test_rows_attend_to_their_own_path(model: Transformer) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(24, heads, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    )
    slope = torch.randn(24, 4, 8, dtype=torch.float64, generator=generator)
    out = forest_causal(NODES, model.arch)(0, q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), slope)

    expected = torch.zeros_like(out)
    for path in PATHS:
        rows = torch.cat([torch.arange(NODES[n].start, NODES[n].stop) for n in path])
        alone = packed_causal([len(rows)], model.arch)(0, q[rows], k[rows], v[rows])
        own = len(rows) - NODES[path[-1]].length
        expected = expected.index_copy(0, rows[own:], alone[own:])
        for number, above in enumerate(path[:-1]):  # rows that several paths have count once
            if path == next(other for other in PATHS if other[: number + 1] == path[: number + 1]):
                start = sum(NODES[n].length for n in path[:number])
                part = slice(start, start + NODES[above].length)
                expected = expected.index_copy(0, rows[part], alone[part])
    torch.testing.assert_close(out, expected)
    for own_gradient, theirs in zip(gradients, torch.autograd.grad(expected, (q, k, v), slope), strict=True):
        torch.testing.assert_close(own_gradient, theirs)


def test_without_shared_prefixes_the_numbers_are_those_of_packed_sequences(model: Transformer) -> None:
    q, k, v = (torch.randn(9, heads, 8) for heads in (4, 2, 2))
    forest = forest_causal([Node(0, 4, 4), Node(4, 9, 9)], model.arch)(0, q, k, v)
    assert torch.equal(forest, packed_causal([4, 5], model.arch)(0, q, k, v))
