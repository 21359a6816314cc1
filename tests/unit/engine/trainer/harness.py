"""What the trainer's tests share: a tiny model in fp32 or fp64, datums, and a naive reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.models import tiny_llama
from tinkex.engine.model.attention import packed_causal
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.lora import LoraRows
from tinkex.engine.model.transformer import LayerWeights, Transformer
from tinkex.engine.trainer.trainer import Trainer, TrainJob, TrainState
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.losses import ForwardBackwardOutput
from tinkex.types.training import LoraConfig

VOCAB = 96


def small_transformer(directory: Path, **options: Any) -> Transformer:
    """A model small enough for finite differences."""
    shape: dict[str, Any] = {
        "vocab": VOCAB,
        "hidden": 16,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
    }
    return load_transformer(tiny_llama(directory, intermediate=24, context=64, **{**shape, **options}))


def in_double(model: Transformer) -> Transformer:
    """The same model in fp64."""
    layers = [_double_layer(layer) for layer in model.layers]
    return Transformer(
        model.arch,
        embedding_VD=model.embedding_VD.double(),
        layers=layers,
        norm_D=model.norm_D.double(),
        unembedding_VD=model.unembedding_VD.double(),
    )


def _double_layer(layer: LayerWeights) -> LayerWeights:
    tensors = {f.name: getattr(layer, f.name) for f in fields(layer)}
    return replace(layer, **{name: None if t is None else t.double() for name, t in tensors.items()})


def trained_state(
    trainer: Trainer, *, seed: int = 0, dtype: torch.dtype = torch.float32, **lora: Any
) -> TrainState:
    """A state whose B is not zero, so that every parameter has a gradient."""
    state = trainer.create(LoraConfig(**{"rank": 4, "seed": seed, **lora}))
    generator = torch.Generator().manual_seed(seed + 1)
    noise = torch.randn(state.adapter.params.shape, generator=generator) * 0.05
    state.adapter = state.adapter.with_params((state.adapter.params + noise).to(dtype))
    return state


def sequence(random: np.random.Generator, length: int) -> list[int]:
    """Token ids of a sequence and the one after it."""
    tokens: list[int] = random.integers(0, VOCAB, length + 1).tolist()
    return tokens


def sft_datum(tokens: Sequence[int], weights: Sequence[float] | None = None, *, prompt: int = 0) -> Datum:
    """Predicts each token from those before it; the first ``prompt`` targets have weight 0."""
    if weights is None:
        weights = [0.0] * prompt + [1.0] * (len(tokens) - 1 - prompt)
    return Datum(
        model_input=ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), "weights": list(weights)},
    )


def random_datum(loss_fn: str, random: np.random.Generator, length: int) -> Datum:
    """A datum with everything ``loss_fn`` reads, about half of it in the prompt."""
    tokens = sequence(random, length)
    sampled = random.random(length) < 0.6
    sampled[-1] = True
    inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
    if loss_fn == "cross_entropy":
        inputs["weights"] = np.where(sampled, random.normal(size=length), 0.0)
    else:
        inputs["logprobs"] = random.normal(-np.log(VOCAB), 0.5, length)
        inputs["advantages"] = np.where(sampled, random.normal(size=length), 0.0)
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = sampled.astype(np.float32)
    return Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def run_one(trainer: Trainer, job: TrainJob) -> ForwardBackwardOutput:
    """The output of a job that succeeds."""
    [output] = trainer.run([job])
    assert isinstance(output, ForwardBackwardOutput), output
    return output


def naive_logprobs(model: Transformer, state: TrainState, datum: Datum, leaf: Tensor | None = None) -> Tensor:
    """Logprobs of a datum's targets, in their shape: the datum alone, all logits together."""
    tokens = torch.tensor(datum.model_input.to_ints())
    adapter = state.adapter if leaf is None else state.adapter.with_params(leaf)
    lora = LoraRows([(adapter, len(tokens))])
    attend = packed_causal([len(tokens)], model.arch)
    hidden = model.hidden(tokens, torch.arange(len(tokens)), attend, lora)
    logits = torch.nn.functional.linear(hidden, model.unembedding_VD)
    if state.adapter.spec.train_unembed:
        logits = lora.apply("lm_head", None, hidden, logits)
    targets = datum.loss_fn_inputs["target_tokens"].to_torch()
    rows = targets if targets.ndim == 2 else targets[:, None]
    return logits.log_softmax(-1).gather(1, rows).reshape(targets.shape)


def naive_loss(loss_fn: str, lp: Tensor, datum: Datum, **settings: float) -> Tensor:
    """The summed loss of one datum, written down from its definition."""
    inputs = {key: value.to_torch().double() for key, value in datum.loss_fn_inputs.items()}
    if loss_fn == "cross_entropy":
        return -(inputs.get("weights", torch.ones_like(lp)) * lp).sum()
    q, advantage = inputs["logprobs"], inputs["advantages"]
    ratio = torch.exp(lp - q)
    low, high = settings.get("clip_low_threshold", 0.8), settings.get("clip_high_threshold", 1.2)
    if loss_fn == "importance_sampling":
        return -(ratio * advantage).sum()
    if loss_fn == "ppo":
        return -torch.min(ratio * advantage, ratio.clamp(low, high) * advantage).sum()
    if loss_fn == "cispo":
        low, high = settings.get("clip_low_threshold", 0.0), settings.get("clip_high_threshold", 4.0)
        return -(ratio.clamp(low, high).detach() * lp * advantage).sum()
    if loss_fn == "dro":
        return -(lp * advantage - 0.5 * settings.get("beta", 0.05) * (lp - q) ** 2).sum()
    assert loss_fn == "gspo"
    marked = inputs["sequence_ratio_mask"] != 0
    sequence_ratio = torch.exp((lp.detach() - q)[marked].mean()) * torch.exp(lp - lp.detach())
    return -torch.min(sequence_ratio * advantage, sequence_ratio.clamp(low, high) * advantage).sum()
