"""Each node against plain torch: the same output, and the gradient finite differences give."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import gradcheck

from tinkex.engine.trainer.lora_kernels import LoraPair, TenantLora, TorchLoraKernel
from tinkex.engine.trainer.nodes import gate, project, rms_norm, rotate_heads

ROWS, INPUTS, OUTPUTS, RANK = 6, 5, 8, 2


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def anchor() -> Tensor:
    return torch.zeros((), requires_grad=True)


def lora(rows: slice, seed: int) -> TenantLora:
    """Two joined projections of 5 and 3 outputs, both with a pair."""
    columns = (slice(0, 5), slice(5, 8))
    pairs = []
    for n, own in enumerate(columns):
        width = own.stop - own.start
        grads = torch.zeros(RANK, INPUTS).double(), torch.zeros(width, RANK).double()
        a_RI, b_OR = random(RANK, INPUTS, seed=seed + 7 + n), random(width, RANK, seed=seed + n)
        pairs.append(LoraPair(own, a_RI, b_OR, grads))
    return TenantLora(rows, 0.5, pairs)


def naive_project(x: Tensor, weight: Tensor, bias: Tensor, loras: list[TenantLora]) -> Tensor:
    pieces = []
    for low in loras:
        effective = weight + low.scale * torch.cat([p.b_OR @ p.a_RI for p in low.pairs])
        pieces.append(x[low.rows] @ effective.T + bias)
    return torch.cat(pieces)


def test_a_projection_adds_each_tenants_pairs_to_its_own_rows() -> None:
    x, weight, bias = random(ROWS, INPUTS), random(OUTPUTS, INPUTS), random(OUTPUTS)
    tenants = [lora(slice(0, 4), 1), lora(slice(4, 6), 20)]
    torch.testing.assert_close(
        project(x, weight, bias, tenants, TorchLoraKernel(), anchor()),
        naive_project(x, weight, bias, tenants),
    )


def test_a_projections_gradients_are_those_of_plain_torch() -> None:
    x, weight, bias = random(ROWS, INPUTS).requires_grad_(), random(OUTPUTS, INPUTS), random(OUTPUTS)
    tenants = [lora(slice(0, 4), 1), lora(slice(4, 6), 20)]
    leaves = [half for low in tenants for pair in low.pairs for half in (pair.a_RI, pair.b_OR)]
    for leaf in leaves:
        leaf.requires_grad_()
    direction = random(ROWS, OUTPUTS, seed=5)
    expected = torch.autograd.grad(naive_project(x, weight, bias, tenants), [x, *leaves], direction)
    for leaf in leaves:
        leaf.requires_grad_(requires_grad=False)
    [grad_x] = torch.autograd.grad(
        project(x, weight, bias, tenants, TorchLoraKernel(), anchor()), x, direction
    )
    own = [grad_x]
    for low in tenants:
        own += [half for pair in low.pairs for half in pair.grads or ()]
    for mine, reference in zip(own, expected, strict=True):
        torch.testing.assert_close(mine, reference)


def test_pairs_get_their_gradient_where_the_input_needs_none() -> None:
    [low] = [lora(slice(0, ROWS), 1)]
    start = anchor()
    project(
        random(ROWS, INPUTS), random(OUTPUTS, INPUTS), None, [low], TorchLoraKernel(), start
    ).sum().backward()
    assert start.grad is None
    assert all(bool(half.any()) for pair in low.pairs for half in pair.grads or ())


def test_without_pairs_a_projection_is_a_linear_map() -> None:
    x = random(ROWS, INPUTS).requires_grad_()
    weight = random(OUTPUTS, INPUTS)
    out = project(x, weight, None, [], TorchLoraKernel(), anchor())
    torch.testing.assert_close(out, x @ weight.T)
    out.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(ROWS, -1))


def test_the_norm_is_torchs() -> None:
    x, weight = random(ROWS, INPUTS).requires_grad_(), random(INPUTS)
    expected = torch.nn.functional.rms_norm(x, (INPUTS,), weight, 1e-3)
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), expected)
    assert gradcheck(lambda x: rms_norm(x, weight, 1e-3), x)


def test_heads_are_rotated_and_values_are_not() -> None:
    cos, sin = random(ROWS, 1, 2), random(ROWS, 1, 2, seed=1)
    qkv = random(ROWS, 16).requires_grad_()  # two query heads, one key and one value head of 4
    q, k, v = rotate_heads(qkv, cos, sin, 2, 1)
    heads = qkv.view(ROWS, 4, 4)
    first, second = heads[..., :2], heads[..., 2:]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    torch.testing.assert_close(torch.cat((q, k), dim=1), turned[:, :3])
    torch.testing.assert_close(v, heads[:, 3:])
    assert gradcheck(lambda qkv: rotate_heads(qkv, cos, sin, 2, 1), qkv)


def test_the_gate_is_silu_times_up() -> None:
    gate_up = random(ROWS, 10).requires_grad_()
    torch.testing.assert_close(gate(gate_up), torch.nn.functional.silu(gate_up[:, :5]) * gate_up[:, 5:])
    assert gradcheck(gate, gate_up)
