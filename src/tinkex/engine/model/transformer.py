"""The transformer of the Llama, Mistral, Qwen2 and Qwen3 dense families, in plain torch.

Shapes: T packed rows, D hidden, F inner size of the MLP, V vocabulary, H heads, K key/value heads, d head
dimension; E = (H + 2K) · d rows of the fused query, key and value projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.attention import Attend
from tinkex.engine.model.lora import LoraRows
from tinkex.engine.model.rope import Rotary, rotate

__all__ = ["LayerWeights", "Transformer"]


@dataclass(frozen=True)
class LayerWeights:
    """One layer's frozen weights; projections that share an input are fused into one matrix."""

    input_norm_D: Tensor
    qkv_ED: Tensor
    qkv_bias_E: Tensor | None
    q_norm_d: Tensor | None
    k_norm_d: Tensor | None
    output_DHd: Tensor
    output_bias_D: Tensor | None
    mlp_norm_D: Tensor
    gate_up_2FD: Tensor
    gate_up_bias_2F: Tensor | None
    down_DF: Tensor
    down_bias_D: Tensor | None


class Transformer:
    """A base model: computes hidden states and logits of packed tokens.

    The base weights never require gradients. With an adapter whose parameters do, autograd works through ``hidden`` and
    ``logits`` and computes gradients only for the adapter. ``attend`` and ``positions_T`` define where sequences start and
    end.

    Example:
        >>> attend = packed_causal([len(tokens_T)], model.arch)
        >>> hidden_TD = model.hidden(tokens_T, torch.arange(len(tokens_T)), attend)
        >>> next_token = model.logits(hidden_TD[-1:]).argmax()
    """

    def __init__(
        self,
        arch: Architecture,
        *,
        embedding_VD: Tensor,
        layers: Sequence[LayerWeights],
        norm_D: Tensor,
        unembedding_VD: Tensor | None = None,
    ) -> None:
        self.arch = arch
        self.embedding_VD = embedding_VD
        self.layers = tuple(layers)
        self.norm_D = norm_D
        self.unembedding_VD = embedding_VD if unembedding_VD is None else unembedding_VD
        self.dtype = embedding_VD.dtype
        self.rotary = Rotary(arch.rope, arch.head_dim)

    def hidden(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, lora: LoraRows | None = None
    ) -> Tensor:
        """Hidden states after the final norm, (T, D)."""
        x_TD = embedding(tokens_T, self.embedding_VD)
        cos_T1h, sin_T1h = self.rotary(positions_T)
        for layer, weights in enumerate(self.layers):
            x_TD = x_TD + self._attention(layer, weights, x_TD, cos_T1h, sin_T1h, attend, lora)
            x_TD = x_TD + self._mlp(layer, weights, x_TD, lora)
        return self._norm(x_TD, self.norm_D)

    def logits(self, hidden_TD: Tensor, lora: LoraRows | None = None) -> Tensor:
        """Logits over the vocabulary, (T, V) in fp32; ``lora`` describes the rows given here."""
        logits_TV = linear(hidden_TD, self.unembedding_VD)
        if lora is not None:
            logits_TV = lora.apply("lm_head", None, hidden_TD, logits_TV)
        return logits_TV.float()

    def _attention(
        self,
        layer: int,
        weights: LayerWeights,
        x_TD: Tensor,
        cos_T1h: Tensor,
        sin_T1h: Tensor,
        attend: Attend,
        lora: LoraRows | None,
    ) -> Tensor:
        arch = self.arch
        q_size, kv_size = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        normed_TD = self._norm(x_TD, weights.input_norm_D)
        qkv_TE = linear(normed_TD, weights.qkv_ED, weights.qkv_bias_E)
        q, k, v = qkv_TE.split_with_sizes((q_size, kv_size, kv_size), dim=-1)
        if lora is not None:
            q = lora.apply("q_proj", layer, normed_TD, q)
            k = lora.apply("k_proj", layer, normed_TD, k)
            v = lora.apply("v_proj", layer, normed_TD, v)
        q_THd = q.view(-1, arch.num_heads, arch.head_dim)
        k_TKd = k.view(-1, arch.num_kv_heads, arch.head_dim)
        v_TKd = v.view(-1, arch.num_kv_heads, arch.head_dim)
        if weights.q_norm_d is not None and weights.k_norm_d is not None:
            q_THd = self._norm(q_THd, weights.q_norm_d)
            k_TKd = self._norm(k_TKd, weights.k_norm_d)
        q_THd = rotate(q_THd, cos_T1h, sin_T1h)
        k_TKd = rotate(k_TKd, cos_T1h, sin_T1h)
        mixed = attend(layer, q_THd, k_TKd, v_TKd).flatten(1)
        out_TD = linear(mixed, weights.output_DHd, weights.output_bias_D)
        return out_TD if lora is None else lora.apply("o_proj", layer, mixed, out_TD)

    def _mlp(self, layer: int, weights: LayerWeights, x_TD: Tensor, lora: LoraRows | None) -> Tensor:
        normed_TD = self._norm(x_TD, weights.mlp_norm_D)
        gate_up = linear(normed_TD, weights.gate_up_2FD, weights.gate_up_bias_2F)
        gate_TF, up_TF = gate_up.chunk(2, dim=-1)
        if lora is not None:
            gate_TF = lora.apply("gate_proj", layer, normed_TD, gate_TF)
            up_TF = lora.apply("up_proj", layer, normed_TD, up_TF)
        inner_TF = silu(gate_TF) * up_TF
        out_TD = linear(inner_TF, weights.down_DF, weights.down_bias_D)
        return out_TD if lora is None else lora.apply("down_proj", layer, inner_TF, out_TD)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square norm over the last dimension, computed in the dtype of ``x``."""
        return rms_norm(x, weight.shape, weight, self.arch.rms_norm_eps)
