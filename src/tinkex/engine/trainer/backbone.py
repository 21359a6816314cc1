"""The transformer's layers in training: the numbers of ``Transformer.hidden``, with less memory traffic.

Shapes: T packed rows, D hidden, F inner size of the MLP, H heads, K key/value heads, d head dimension, h half
of it, E = (H + 2K) · d.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

from tinkex.engine.model.forest_attention import forest_causal
from tinkex.engine.model.lora import Adapter
from tinkex.engine.model.rope import rotate
from tinkex.engine.model.transformer import LayerWeights, Transformer
from tinkex.engine.trainer.batch import PackedBatch
from tinkex.engine.trainer.lora_kernels import LoraKernel, LoraPair, TenantLora, choose_lora_kernel
from tinkex.engine.trainer.nodes import gate, project, rms_norm, rotate_heads

__all__ = ["Backbone", "Tenant"]


class Tenant:
    """An adapter and, if it trains, the flat buffer that accumulates its gradient.

    Example:
        >>> tenant = Tenant(state.adapter, torch.zeros_like(state.adapter.params))
    """

    def __init__(self, adapter: Adapter, grad: Tensor | None = None) -> None:
        self.scale = adapter.spec.scale
        self.pairs = adapter.views
        self.grads = None if grad is None else adapter.with_params(grad).views

    def lora(self, rows: slice, layer: int, outputs: Mapping[str, int]) -> TenantLora | None:
        """Its LoRA on fused projections of a layer, given their output sizes; None if it has none there."""
        columns = zip(outputs, pairwise(accumulate(outputs.values(), initial=0)), strict=True)
        pairs = [
            LoraPair(
                slice(*ends),
                *self.pairs[module, layer],
                grads=None if self.grads is None else self.grads[module, layer],
            )
            for module, ends in columns
            if (module, layer) in self.pairs
        ]
        return TenantLora(rows, self.scale, pairs) if pairs else None


class Backbone:
    """All layers of a base model below its unembedding, with a backward pass.

    Example:
        >>> hidden_TD = Backbone(model).hidden(packed, [tenant])
        >>> torch.autograd.backward(hidden_TD, grad_TD)  # adds to the tenant's gradient
    """

    def __init__(self, model: Transformer, kernel: LoraKernel | None = None) -> None:
        self._model = model
        self._kernel = choose_lora_kernel(model) if kernel is None else kernel

    def hidden(self, packed: PackedBatch, tenants: Sequence[Tenant], *, recompute: bool = False) -> Tensor:
        """Hidden states after the final norm; ``tenants`` has one entry per segment of the batch.

        With ``recompute`` (activation checkpointing) only the input of each layer is kept for the backward pass, which
        computes the layer again: about a third more time, for a small part of the memory.
        """
        model = self._model
        layers = _Layers(model, packed, tenants, self._kernel)
        x_TD = embedding(torch.from_numpy(packed.tokens_T), model.embedding_VD)
        for number in range(len(model.layers)):
            if recompute and torch.is_grad_enabled():
                x_TD = checkpoint(layers, number, x_TD, use_reentrant=False, preserve_rng_state=False)
            else:
                x_TD = layers(number, x_TD)
        return rms_norm(x_TD, model.norm_D, model.arch.rms_norm_eps)


class _Layers:
    """The layers of a model for the rows of one batch."""

    def __init__(
        self, model: Transformer, packed: PackedBatch, tenants: Sequence[Tenant], kernel: LoraKernel
    ) -> None:
        arch = model.arch
        self._model = model
        self._kernel = kernel
        self._owners = [
            (segment.rows, tenant) for segment, tenant in zip(packed.segments, tenants, strict=True)
        ]
        self._attend = forest_causal(packed.nodes, arch)
        self._cos_T1h, self._sin_T1h = model.rotary(torch.from_numpy(packed.positions_T))
        # Gradients of LoRA are not inputs of an autograd node; this input makes autograd record the node.
        self._anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
        q_size, kv_size = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        self._qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self._gate_up = {"gate_proj": arch.intermediate_size, "up_proj": arch.intermediate_size}

    def __call__(self, number: int, x_TD: Tensor) -> Tensor:
        weights = self._model.layers[number]
        x_TD = x_TD + self._attention(number, weights, x_TD)
        return x_TD + self._mlp(number, weights, x_TD)

    def _attention(self, number: int, weights: LayerWeights, x_TD: Tensor) -> Tensor:
        normed_TD = rms_norm(x_TD, weights.input_norm_D, self._model.arch.rms_norm_eps)
        qkv_TE = self._project(number, normed_TD, weights.qkv_ED, weights.qkv_bias_E, self._qkv)
        q_THd, k_TKd, v_TKd = self._heads(weights, qkv_TE)
        mixed = self._attend(number, q_THd, k_TKd, v_TKd).flatten(1)
        outputs = {"o_proj": self._model.arch.hidden_size}
        return self._project(number, mixed, weights.output_DHd, weights.output_bias_D, outputs)

    def _heads(self, weights: LayerWeights, qkv_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        arch = self._model.arch
        if weights.q_norm_d is None or weights.k_norm_d is None:
            return rotate_heads(qkv_TE, self._cos_T1h, self._sin_T1h, arch.num_heads, arch.num_kv_heads)
        heads = qkv_TE.view(len(qkv_TE), -1, arch.head_dim)
        sizes = (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)
        q_THd, k_TKd, v_TKd = heads.split_with_sizes(sizes, dim=1)
        q_THd = rms_norm(q_THd, weights.q_norm_d, arch.rms_norm_eps)
        k_TKd = rms_norm(k_TKd, weights.k_norm_d, arch.rms_norm_eps)
        cos_T1h, sin_T1h = self._cos_T1h, self._sin_T1h
        return rotate(q_THd, cos_T1h, sin_T1h), rotate(k_TKd, cos_T1h, sin_T1h), v_TKd

    def _mlp(self, number: int, weights: LayerWeights, x_TD: Tensor) -> Tensor:
        normed_TD = rms_norm(x_TD, weights.mlp_norm_D, self._model.arch.rms_norm_eps)
        gate_up = self._project(
            number, normed_TD, weights.gate_up_2FD, weights.gate_up_bias_2F, self._gate_up
        )
        outputs = {"down_proj": self._model.arch.hidden_size}
        return self._project(number, gate(gate_up), weights.down_DF, weights.down_bias_D, outputs)

    def _project(
        self, number: int, x: Tensor, weight: Tensor, bias: Tensor | None, outputs: Mapping[str, int]
    ) -> Tensor:
        tenant_loras = (tenant.lora(rows, number, outputs) for rows, tenant in self._owners)
        loras = [lora for lora in tenant_loras if lora is not None]
        return project(x, weight, bias, loras, self._kernel, self._anchor)
