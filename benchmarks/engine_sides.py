"""The two sides of the engine benchmark on the same weights: our trainer and sampler, and transformers with PEFT."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinkex import types
from tinkex.engine.config import tinkex_home
from tinkex.engine.model.catalog import DEFAULT_MODEL, load_model, resolve
from tinkex.engine.model.lora import Adapter
from tinkex.engine.sampler.job import SampleJob
from tinkex.engine.sampler.sampler import Sampler
from tinkex.engine.trainer.trainer import Trainer, TrainJob, TrainState

__all__ = ["Ours", "Theirs", "answers", "clock", "datum", "finish", "random_tokens", "timed"]

RANK, ALPHA = 32, 32


def models_home() -> Path:
    return tinkex_home() / "models"


def clock() -> float:
    """Seconds; with one compute thread CPU seconds of this process, which other load changes least."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


@contextmanager
def timed(times: list[float]) -> Iterator[None]:
    start = clock()
    yield
    times.append(clock() - start)


def random_tokens(length: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(t) for t in rng.integers(1000, 40_000, size=length)]


def datum(length: int, seed: int, weighted: float = 1.0) -> types.Datum:
    """Returns a datum of random tokens; the last fraction ``weighted`` of them has weight 1."""
    tokens = random_tokens(length + 1, seed)
    first = length - round(length * weighted)
    return types.Datum(
        types.ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": tokens[1:], "weights": [float(i >= first) for i in range(length)]},
    )


def answers(prompt: int, count: int, length: int) -> list[types.Datum]:
    """Returns datums that begin with the same ``prompt`` tokens; the ``length`` tokens after it have weight 1."""
    common = random_tokens(prompt, 0)
    data = []
    for seed in range(1, count + 1):
        tokens = [*common, *random_tokens(length + 1, seed)]
        weights = [float(i >= prompt - 1) for i in range(len(tokens) - 1)]
        data.append(
            types.Datum(
                types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights}
            )
        )
    return data


class Ours:
    """Our engine without a server: trainer and sampler."""

    def __init__(self, model: str = DEFAULT_MODEL) -> None:
        self.model = load_model(model, models_home())
        self.trainer = Trainer(self.model.transformer)
        self._ids = itertools.count()

    def state(self, seed: int = 0, rank: int = RANK) -> TrainState:
        # no adapter on the unembedding, as in PEFT's default
        return self.trainer.create(types.LoraConfig(rank=rank, seed=seed, train_unembed=False))

    def adapter(self, seed: int, rank: int = RANK) -> Adapter:
        adapter = self.state(seed, rank).adapter
        generator = torch.Generator().manual_seed(seed)
        return adapter.with_params(
            adapter.params + 0.001 * torch.randn(adapter.params.shape, generator=generator)
        )

    def forward_backward(
        self, jobs: Sequence[tuple[TrainState, Sequence[types.Datum]]], *, share_prefixes: bool = True
    ) -> None:
        train_jobs = [TrainJob(s, d, "cross_entropy") for s, d in jobs]
        for outcome in self.trainer.run(train_jobs, share_prefixes=share_prefixes):
            if isinstance(outcome, Exception):
                raise outcome

    def sampler(self, **options: Any) -> Sampler:
        return Sampler(self.model.transformer, self.model.tokenizer, **options)

    def job(
        self, prompt: Sequence[int], new_tokens: int, adapter: Adapter | None = None, num_samples: int = 1
    ) -> SampleJob:
        name = f"job-{next(self._ids)}"
        params = types.SamplingParams(max_tokens=new_tokens, temperature=1.0, seed=7, stop=[])
        ids = [f"{name}-{i}" for i in range(num_samples)]
        return SampleJob(name, adapter, np.asarray(prompt, np.int32), num_samples, params, ids)


def finish(sampler: Sampler) -> int:
    """Runs the sampler until it is idle; returns the number of sampled tokens."""
    tokens = 0
    while sampler.busy:
        for _, outcome in sampler.step():
            if isinstance(outcome, Exception):
                raise outcome
            tokens += sum(len(sequence.tokens_np) for sequence in outcome.sequences)
    return tokens


class Theirs:
    """transformers, with PEFT's LoRA for training, on the same model directory."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        directory = resolve(DEFAULT_MODEL, models_home())
        loader: Any = AutoModelForCausalLM  # its methods have no types
        self.model = loader.from_pretrained(directory, dtype=torch.float32)
        self.model.eval()
        self._trained: Any = None

    @property
    def trained(self) -> Any:
        """The model with LoRA on every linear layer of attention and MLP."""
        from peft import LoraConfig, get_peft_model

        if self._trained is None:
            names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=names, lora_dropout=0.0)
            self._trained = get_peft_model(self.model, config)
        return self._trained

    def forward_backward(self, data: Sequence[types.Datum]) -> None:
        """One padded batch, summed cross-entropy over the weighted tokens."""
        max_length = max(d.model_input.length for d in data)
        ids_BT = torch.zeros((len(data), max_length), dtype=torch.int64)
        mask_BT, weights_BT = torch.zeros_like(ids_BT), torch.zeros((len(data), max_length))
        targets_BT = torch.zeros_like(ids_BT)
        for row, one in enumerate(data):
            n = one.model_input.length
            ids_BT[row, :n] = torch.tensor(one.model_input.to_ints())
            targets_BT[row, :n] = one.loss_fn_inputs["target_tokens"].to_torch()
            weights_BT[row, :n] = one.loss_fn_inputs["weights"].to_torch()
            mask_BT[row, :n] = 1
        logits_BTV = self.trained(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none"
        )
        loss: Any = (losses * weights_BT.flatten()).sum()
        loss.backward()

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        """Returns the duration of the decode steps after the prefill; every step samples from the softmax."""
        ids_BT = torch.tensor(prompts)
        out = self.model(input_ids=ids_BT, use_cache=True, logits_to_keep=1)
        start = 0.0
        for step in range(new_tokens + 1):
            if step == 1:
                start = clock()
            probs_BV = torch.softmax(out.logits[:, -1], -1)
            next_B1 = torch.multinomial(probs_BV, 1)
            if step < new_tokens:
                out = self.model(input_ids=next_B1, past_key_values=out.past_key_values, use_cache=True)
        return clock() - start

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        """Runs ``generate`` with sampling and left padding."""
        max_length = max(map(len, prompts))
        ids_BT = torch.tensor([[0] * (max_length - len(p)) + list(p) for p in prompts])
        mask_BT = torch.tensor([[0] * (max_length - len(p)) + [1] * len(p) for p in prompts])
        self.model.generate(
            input_ids=ids_BT, attention_mask=mask_BT, do_sample=True, top_k=0, pad_token_id=0,
            max_new_tokens=new_tokens, min_new_tokens=new_tokens,
        )  # fmt: skip
