"""Logprobs and gradients of the unembedding, chunk by chunk, against all logits together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tinkex.engine.trainer.batch import PackedBatch, pack_batches
from tinkex.engine.trainer.examples import Example
from tinkex.engine.trainer.head import Head, HeadLora

VOCAB, HIDDEN, RANK = 11, 4, 2


def packed_of(*jobs: list[tuple[int, int]]) -> PackedBatch:
    random = np.random.default_rng(0)

    def example(length: int, width: int) -> Example:
        targets = random.integers(0, VOCAB, length * width)
        return Example(random.integers(0, VOCAB, length), targets, {}, (length, width))

    [packed] = pack_batches([{n: [example(*shape) for shape in job]} for n, job in enumerate(jobs)], 1000)
    return packed


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("max_rows", "max_targets"), [(1, 1), (3, 2), (100, 100)])
def test_chunks_add_up_to_the_whole(max_rows: int, max_targets: int) -> None:
    packed = packed_of([(3, 1), (4, 2)], [(5, 1)])
    rows, size = len(packed.tokens_T), len(packed.targets_P)
    weight, hidden = random(VOCAB, HIDDEN, seed=1), random(rows, HIDDEN, seed=2).requires_grad_()
    a, b = random(RANK, HIDDEN, seed=3).requires_grad_(), random(VOCAB, RANK, seed=4).requires_grad_()
    slope = random(size, seed=5)  # d loss / d logprob
    first = packed.segments[0].rows

    logits = hidden @ weight.T
    logits = torch.cat([logits[first] + 0.5 * hidden[first] @ a.T @ b.T, logits[first.stop :]])
    row_of_target = torch.from_numpy(np.repeat(np.arange(rows), np.diff(packed.first_target_T1)))
    expected = logits.log_softmax(-1)[row_of_target, torch.from_numpy(packed.targets_P)]
    # Rows 2 and 8 do not train.
    trains = np.ones(rows, dtype=bool)
    trains[[2, 8]] = False
    kept = slope * torch.from_numpy(trains)[row_of_target]
    gradients = torch.autograd.grad(expected, [hidden, a, b], kept)

    head = Head(weight, max_rows=max_rows, max_targets=max_targets)
    grad_a, grad_b = torch.zeros_like(a), torch.zeros_like(b)
    loras = [HeadLora(a.detach(), b.detach(), 0.5, grad_a, grad_b), None]
    lp_P, grad_hidden = torch.full((size,), torch.nan).double(), torch.zeros_like(hidden)
    with torch.no_grad():
        numbers = np.arange(rows)
        head.train(
            hidden.detach(),
            packed,
            loras,
            numbers[trains],
            lp_P,
            lambda targets, lp: slope[torch.from_numpy(targets)],
            grad_hidden,
        )
        head.score(hidden.detach(), packed, loras, numbers[~trains], lp_P)
    torch.testing.assert_close(lp_P, expected.detach())
    for own, reference in zip((grad_hidden, grad_a, grad_b), gradients, strict=True):
        torch.testing.assert_close(own, reference)


class LargestResult(TorchDispatchMode):
    """Remembers how many elements the largest result of an operation had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.slow
def test_many_targets_of_a_row_are_not_all_in_memory_as_vectors_simultaneously() -> None:
    packed = packed_of([(2, 500)])
    hidden = random(2, HIDDEN, seed=2)
    pair = HeadLora(random(RANK, HIDDEN, seed=3), random(VOCAB, RANK, seed=4), 0.5)
    head = Head(random(VOCAB, HIDDEN, seed=1), max_targets=100)
    with LargestResult() as largest:
        head.train(
            hidden,
            packed,
            [pair],
            np.arange(2),
            torch.zeros(1000).double(),
            lambda targets, lp: torch.ones_like(lp),
            torch.zeros_like(hidden),
        )
    assert largest.elements == 1000  # a number for each target, where their vectors have 4000


def test_a_gradient_is_requested_once_per_chunk() -> None:
    packed = packed_of([(3, 1)], [(2, 2)])
    asked: list[list[int]] = []

    def gradient(targets: np.ndarray, lp: torch.Tensor) -> torch.Tensor:
        asked.append(targets.tolist())
        return torch.zeros_like(lp)

    hidden = random(5, HIDDEN, seed=2)
    Head(random(VOCAB, HIDDEN, seed=1), max_rows=10).train(
        hidden,
        packed,
        [None, None],
        np.arange(5),
        torch.zeros(7).double(),
        gradient,
        torch.zeros_like(hidden),
    )
    assert asked == [[0, 1, 2, 3, 4, 5, 6]]
