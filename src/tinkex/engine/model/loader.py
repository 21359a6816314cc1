"""Reads a Hugging Face model directory into a ``Transformer``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.stored_tensors import StoredTensors, read_architecture
from tinkex.engine.model.transformer import LayerWeights, Transformer

__all__ = ["load_transformer", "read_architecture"]


def load_transformer(directory: Path) -> Transformer:
    """The model in ``directory``, in fp32 on the CPU.

    Reads ``config.json`` and the weights, in one ``model.safetensors`` or in the shards that
    ``model.safetensors.index.json`` lists. Raises ``SetupError``, which names the file or tensor, if they do not match.

    Example:
        >>> model = load_transformer(Path("models/SmolLM2-135M-Instruct"))
        >>> model.arch.num_layers
        30
    """
    arch = read_architecture(directory)
    with ExitStack() as files:
        stored = StoredTensors(directory, files)
        stored.check(arch)
        return _assemble(arch, stored)


def _assemble(arch: Architecture, stored: StoredTensors) -> Transformer:
    hidden, inner = arch.hidden_size, arch.intermediate_size
    q_size, kv_size = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    layers = []
    for layer in range(arch.num_layers):
        attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        qkv = [
            (f"{attention}.q_proj", q_size),
            (f"{attention}.k_proj", kv_size),
            (f"{attention}.v_proj", kv_size),
        ]
        gate_up = [(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)]
        layers.append(
            LayerWeights(
                input_norm_D=stored.vector(f"layers.{layer}.input_layernorm.weight", hidden),
                qkv_ED=stored.fused_weight(qkv, hidden),
                qkv_bias_E=stored.fused_bias(qkv) if arch.attention_bias else None,
                q_norm_d=stored.vector(f"{attention}.q_norm.weight", arch.head_dim) if arch.qk_norm else None,
                k_norm_d=stored.vector(f"{attention}.k_norm.weight", arch.head_dim) if arch.qk_norm else None,
                output_DHd=stored.matrix(f"{attention}.o_proj.weight", hidden, q_size),
                output_bias_D=stored.vector(f"{attention}.o_proj.bias", hidden) if arch.output_bias else None,
                mlp_norm_D=stored.vector(f"layers.{layer}.post_attention_layernorm.weight", hidden),
                gate_up_2FD=stored.fused_weight(gate_up, hidden),
                gate_up_bias_2F=stored.fused_bias(gate_up) if arch.mlp_bias else None,
                down_DF=stored.matrix(f"{mlp}.down_proj.weight", hidden, inner),
                down_bias_D=stored.vector(f"{mlp}.down_proj.bias", hidden) if arch.mlp_bias else None,
            )
        )
    return Transformer(
        arch,
        embedding_VD=stored.matrix("embed_tokens.weight", arch.vocab_size, hidden),
        layers=layers,
        norm_D=stored.vector("norm.weight", hidden),
        unembedding_VD=None
        if arch.tie_embeddings
        else stored.matrix("lm_head.weight", arch.vocab_size, hidden),
    )
