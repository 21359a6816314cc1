"""The compiled core's low-rank pairs against torch in float64, for shapes that fit no panel, and their independence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.kernels.cores import CORES
from tests.unit.engine.trainer.lora_runs import Shape, loras, random, run
from tinkex.engine.kernels import CoreUnavailable
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.threads import torch_team
from tinkex.engine.trainer import lora_kernels
from tinkex.engine.trainer.lora_kernels import (
    CompiledLoraKernel,
    TenantLora,
    TorchLoraKernel,
    choose_lora_kernel,
)

TEAM = torch_team()
needs_core = pytest.mark.skipif(
    not CORES or TEAM is None, reason="the package was installed without its compiled core"
)


def compiled(variant: str) -> CompiledLoraKernel:
    assert TEAM is not None
    return CompiledLoraKernel(CORES[variant], TEAM)


shapes = st.builds(
    Shape,
    inputs=st.sampled_from([1, 5, 16, 63, 64, 100, 200]),
    outputs=st.lists(st.sampled_from([1, 7, 32, 65, 130]), min_size=3, max_size=3),
    tenants=st.lists(
        st.tuples(st.sampled_from([1, 3, 64, 90, 130, 300]), st.sampled_from([1, 8, 17, 32, 70])),
        min_size=1,
        max_size=4,
    ),
    reached=st.lists(st.booleans(), min_size=3, max_size=3).filter(any),
)


@pytest.mark.slow
@needs_core
@pytest.mark.parametrize("variant", CORES)
@settings(max_examples=40, deadline=None)
@given(shape=shapes)
def test_the_core_gives_the_numbers_of_float64(variant: str, shape: Shape) -> None:
    found, exact = run(compiled(variant), shape), run(TorchLoraKernel(), shape, torch.float64)
    sizes = run(TorchLoraKernel(), shape, torch.float64, signs=False)
    for mine, reference, size in zip(found.tensors, exact.tensors, sizes.tensors, strict=True):
        torch.testing.assert_close(mine / size, reference / size, rtol=0, atol=1e-6, check_dtype=False)


@needs_core
@pytest.mark.parametrize("variant", CORES)
def test_neither_neighbours_nor_threads_change_a_bit(variant: str) -> None:
    math, before = compiled(variant), torch.get_num_threads()
    shape = Shape(96, [80, 24], [(70, 8), (200, 32), (5, 16)], [True, True])
    try:
        together = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            together.append(run(math, shape))
    finally:
        torch.set_num_threads(before)
    for other in together[1:]:
        assert all(map(torch.equal, together[0].tensors, other.tensors))
    x, grad = random(275, 96, seed=7), random(275, 104, seed=8)
    whole, alone = loras(shape), loras(shape)
    for number, low in enumerate(alone):
        own = TenantLora(slice(0, low.rows.stop - low.rows.start), low.scale, low.pairs)
        out, grad_x = torch.ones(own.rows.stop, 104), torch.ones(own.rows.stop, 96)
        kept = math.forward(x[low.rows], out, [own])
        math.backward(grad[low.rows], x[low.rows], kept, grad_x, [own])
        assert torch.equal(out, together[0].out[low.rows])
        assert torch.equal(grad_x, together[0].grad_x[low.rows])
        found = [half for pair in low.pairs for half in pair.grads or ()]
        first = sum(2 * len(earlier.pairs) for earlier in whole[:number])
        assert all(map(torch.equal, found, together[0].grads[first : first + len(found)]))


@needs_core
def test_what_does_not_train_gets_no_gradient_and_inputs_need_none() -> None:
    math = compiled(next(iter(CORES)))
    shape = Shape(32, [16], [(40, 4), (9, 8)], [True])
    lows = [*loras(shape, trained=False)[:1], loras(shape)[1]]
    x, grad, out = random(49, 32, seed=1), random(49, 16, seed=2), torch.zeros(49, 16)
    math.backward(grad, x, math.forward(x, out, lows), None, lows)
    [trained] = lows[1].pairs
    assert trained.grads is not None
    assert all(bool((half != 1).any()) for half in trained.grads)


@needs_core
def test_inputs_that_lie_column_by_column_are_read_as_they_are_meant() -> None:
    math = compiled(next(iter(CORES)))
    shape = Shape(32, [16], [(40, 4)], [True])
    x, grad = random(32, 40, seed=1).T, random(16, 40, seed=2).T
    found = []
    for rows, gradient in ((x, grad), (x.contiguous(), grad.contiguous())):
        lows, out, grad_x = loras(shape), torch.zeros(40, 16), torch.zeros(40, 32)
        math.backward(gradient, rows, math.forward(rows, out, lows), grad_x, lows)
        found.append([out, grad_x, *(half for pair in lows[0].pairs for half in pair.grads or ())])
    assert all(map(torch.equal, *found))


def test_torch_computes_what_the_core_does_not(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_transformer(tiny_model)
    if CORES and TEAM is not None:
        assert isinstance(choose_lora_kernel(model), CompiledLoraKernel)

    def no_core() -> None:
        raise CoreUnavailable("none here")

    with monkeypatch.context() as patched:
        patched.setattr(lora_kernels, "load_core", no_core)
        assert isinstance(choose_lora_kernel(model), TorchLoraKernel)
    with monkeypatch.context() as patched:
        patched.setattr(lora_kernels, "torch_team", lambda: None)
        assert isinstance(choose_lora_kernel(model), TorchLoraKernel)
    monkeypatch.setattr(model, "dtype", torch.bfloat16)
    assert isinstance(choose_lora_kernel(model), TorchLoraKernel)
