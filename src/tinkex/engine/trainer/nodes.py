"""The autograd functions of a transformer layer with LoRA.

Base weights have no gradient. Gradients of LoRA do not go through autograd: the backward pass of a projection adds them
directly to their buffers. Projections that are fused in the forward pass are fused in the backward pass.

Shapes: T packed rows, I and O inputs and outputs of a projection, F inner size of the MLP, H query heads, K
key/value heads, G = H + K, d head dimension, h half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import silu

from tinkex.engine.model.products import back_product, linear
from tinkex.engine.trainer.lora_kernels import LoraKernel, TenantLora

__all__ = ["gate", "project", "rms_norm", "rotate_heads"]


def project(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    loras: Sequence[TenantLora],
    kernel: LoraKernel,
    anchor: Tensor,
) -> Tensor:
    """``x Wᵀ + bias`` plus each tenant's ``scale · x Aᵀ Bᵀ``, computed by ``kernel``.

    ``anchor`` is any tensor that requires a gradient; it gets none, but makes autograd record the node where ``x_TI``
    needs no gradient.
    """
    node_anchor = anchor if loras else None
    out_TO: Tensor = _Project.apply(x_TI, node_anchor, weight_OI, bias_O, loras, kernel)  # type: ignore[no-untyped-call]  # torch's
    return out_TO


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    normed: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]  # torch's
    return normed


def rotate_heads(
    qkv_TO: Tensor, cos_T1h: Tensor, sin_T1h: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits fused projections into q_THd, k_TKd and v_TKd, with q and k rotated."""
    q, k, v = _RotateHeads.apply(qkv_TO, cos_T1h, sin_T1h, num_heads, num_kv_heads)  # type: ignore[no-untyped-call]  # torch's
    return q, k, v


def gate(gate_up_T2F: Tensor) -> Tensor:
    """``silu(gate) · up`` of fused projections."""
    inner_TF: Tensor = _Gate.apply(gate_up_T2F)  # type: ignore[no-untyped-call]  # torch's
    return inner_TF


class _Project(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        _anchor: Tensor | None,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        loras: Sequence[TenantLora],
        kernel: LoraKernel,
    ) -> Tensor:
        out_TO = linear(x_TI, weight_OI, bias_O)
        if loras:
            ctx.save_for_backward(x_TI, *kernel.forward(x_TI, out_TO, loras))
        ctx.weight_OI, ctx.loras, ctx.kernel = weight_OI, loras, kernel
        return out_TO

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TO,) = grad_outputs
        grad_TI = back_product(grad_TO, ctx.weight_OI) if ctx.needs_input_grad[0] else None
        if ctx.loras:
            x_TI, *shrunk = ctx.saved_tensors
            ctx.kernel.backward(grad_TO, x_TI, shrunk, grad_TI, ctx.loras)
        return grad_TI, None, None, None, None, None


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, inverse)
        ctx.weight = weight
        normed = x * inverse
        return normed.mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # With x̂ = x·inverse: dx = inverse·(dx̂ − x̂·mean(dx̂·x̂)).
        x, inverse = ctx.saved_tensors
        grad_x = grad_outputs[0] * ctx.weight
        mean = (grad_x * x).sum(dim=-1, keepdim=True).div_(x.shape[-1])
        grad_x.mul_(inverse)
        grad_x.addcmul_(x, mean.mul_(inverse**3), value=-1)
        return grad_x, None, None


class _RotateHeads(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_TO: Tensor, cos_T1h: Tensor, sin_T1h: Tensor, num_heads: int, num_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        rotated = num_heads + num_kv_heads
        heads = qkv_TO.view(len(qkv_TO), rotated + num_kv_heads, -1)
        ctx.cos_T1h, ctx.sin_T1h, ctx.rotated = cos_T1h, sin_T1h, rotated
        out_TGd = torch.empty_like(heads[:, :rotated], memory_format=torch.contiguous_format)
        _rotate_into(heads[:, :rotated], cos_T1h, sin_T1h, out_TGd, sign=1)
        return out_TGd[:, :num_heads], out_TGd[:, num_heads:], heads[:, rotated:].clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_q, grad_k, grad_v = grad_outputs
        (rows, num_heads, head_dim), num_kv_heads = grad_q.shape, grad_k.shape[1]
        grad = grad_q.new_empty(rows, ctx.rotated + num_kv_heads, head_dim)
        _rotate_into(grad_q, ctx.cos_T1h, ctx.sin_T1h, grad[:, :num_heads], sign=-1)
        _rotate_into(grad_k, ctx.cos_T1h, ctx.sin_T1h, grad[:, num_heads : ctx.rotated], sign=-1)
        grad[:, ctx.rotated :] = grad_v
        return grad.flatten(1), None, None, None, None


def _rotate_into(heads: Tensor, cos_T1h: Tensor, sin_T1h: Tensor, out: Tensor, *, sign: int) -> None:
    """Rotates the two halves of every head by the angle (``sign=1``) or back (``sign=-1``)."""
    first, second = heads.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos_T1h, out=out_first).addcmul_(second, sin_T1h, value=-sign)
    torch.mul(second, cos_T1h, out=out_second).addcmul_(first, sin_T1h, value=sign)


class _Gate(Function):
    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_T2F)
        gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
        return silu(gate_TF).mul_(up_TF)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (grad_TF,) = grad_outputs
        (gate_up_T2F,) = ctx.saved_tensors
        gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
        grad_T2F = torch.empty_like(gate_up_T2F)
        grad_gate_TF, grad_up_TF = grad_T2F.chunk(2, dim=-1)
        torch.mul(silu(gate_TF), grad_TF, out=grad_up_TF)
        torch.ops.aten.silu_backward.grad_input(grad_TF * up_TF, gate_TF, grad_input=grad_gate_TF)
        return grad_T2F
