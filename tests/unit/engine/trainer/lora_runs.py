"""Random LoRA matrices, and what a kernel computes from them for random rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tinkex.engine.trainer.lora_kernels import LoraKernel, LoraPair, TenantLora


@dataclass
class Shape:
    """Joined projections, and the rows and rank of each tenant; ``reached`` says which parts have a pair."""

    inputs: int
    outputs: list[int]
    tenants: list[tuple[int, int]]
    reached: list[bool]

    @property
    def num_rows(self) -> int:
        return sum(rows for rows, _ in self.tenants)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loras(shape: Shape, dtype: torch.dtype = torch.float32, *, trained: bool = True) -> list[TenantLora]:
    lows, row = [], 0
    for tenant, (rows, rank) in enumerate(shape.tenants):
        found, column = [], 0
        for part, (width, reached) in enumerate(zip(shape.outputs, shape.reached, strict=True)):
            seed = 100 * tenant + 10 * part
            halves = random(rank, shape.inputs, seed=seed), random(width, rank, seed=seed + 1)
            a_RI, b_OR = (half.to(dtype) for half in halves)
            grads = torch.ones_like(a_RI), torch.ones_like(b_OR)
            if reached:
                found.append(LoraPair(slice(column, column + width), a_RI, b_OR, grads if trained else None))
            column += width
        lows.append(TenantLora(slice(row, row + rows), 1 / (tenant + 1), found))
        row += rows
    return lows


@dataclass
class Outcome:
    out: Tensor
    grad_x: Tensor
    grads: list[Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.out, self.grad_x, *self.grads]


def run(math: LoraKernel, shape: Shape, dtype: torch.dtype = torch.float32, *, signs: bool = True) -> Outcome:
    """What comes out for random numbers; without their signs nothing cancels."""
    lows = loras(shape, dtype)
    x = random(shape.num_rows, shape.inputs, seed=7).to(dtype)
    grad = random(shape.num_rows, sum(shape.outputs), seed=8).to(dtype)
    if not signs:
        halves = [half for low in lows for pair in low.pairs for half in (pair.a_RI, pair.b_OR)]
        for values in (x, grad, *halves):
            values.abs_()
    out, grad_x = torch.ones_like(grad), torch.ones_like(x)
    math.backward(grad, x, math.forward(x, out, lows), grad_x, lows)
    return Outcome(out, grad_x, [half for low in lows for pair in low.pairs for half in pair.grads or ()])
