"""Our side of the benchmark against TRL: whole steps through the client and the embedded engine."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from trl_workload import ANSWER_LENGTH, ANSWERS, RANK, SFT_BATCH, Workload, make_workload

import tinkex
from tinkex import types

ADAM = types.AdamParams(learning_rate=1e-5)
BETA = 0.1


def datum(tokens: Sequence[int], first: int, **per_token: Sequence[float]) -> types.Datum:
    """A datum whose tokens from number ``first`` on are trained; ``per_token`` has a value for each of these."""
    padding = [0.0] * (first - 1)
    inputs: dict[str, Any] = {name: [*padding, *values] for name, values in per_token.items()}
    return types.Datum(
        types.ModelInput.from_ints(list(tokens[:-1])), {"target_tokens": list(tokens[1:]), **inputs}
    )


class Steps:
    """One run on the default model, and the steps of each case."""

    def __init__(self, service: tinkex.ServiceClient, tokenizer: Any, work: Workload) -> None:
        [*_, model] = [one.model_name for one in service.get_server_capabilities().supported_models]
        assert model is not None
        self._training = service.create_lora_training_client(model, rank=RANK, train_unembed=False)
        self._reference = service.create_sampling_client(base_model=model)
        self._encode: Callable[[str], list[int]] = lambda text: list(tokenizer.encode(text).ids)
        self._work = work

    def grpo(self) -> None:
        """Samples groups of answers, scores them, and takes one step on all of them."""
        sampler = self._training.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=ANSWER_LENGTH, temperature=1.0, stop=[])
        prompts = [self._encode(prompt) for prompt in self._work.grpo_prompts]
        futures = [
            sampler.sample(types.ModelInput.from_ints(prompt), num_samples=ANSWERS, sampling_params=params)
            for prompt in prompts
        ]
        data = []
        for prompt, future in zip(prompts, futures, strict=True):
            group = future.result().sequences
            rewards = np.array([np.mean([token % 2 for token in one.tokens]) for one in group])
            scaled = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            for one, advantage in zip(group, scaled, strict=True):
                assert len(one.tokens) == ANSWER_LENGTH
                assert one.logprobs is not None
                weights = [float(advantage)] * ANSWER_LENGTH
                tokens = [*prompt, *one.tokens]
                data.append(datum(tokens, len(prompt), logprobs=one.logprobs, advantages=weights))
        self._step(data, "importance_sampling")

    def sft(self) -> None:
        """One epoch in batches of examples in random order."""
        order = np.random.default_rng(0).permutation(len(self._work.sft_texts))
        for first in range(0, len(order), SFT_BATCH):
            texts = [self._work.sft_texts[i] for i in order[first : first + SFT_BATCH]]
            tokens = [self._encode(text) for text in texts]
            self._step([datum(ids, 1, weights=[1.0] * (len(ids) - 1)) for ids in tokens], "cross_entropy")

    def dpo(self) -> None:
        """Logprobs of policy and reference, and one step with the gradient of the preference loss."""
        answers = [
            (self._encode(prompt), self._encode(answer))
            for prompt, *both in self._work.dpo_pairs
            for answer in both
        ]
        whole = [[*prompt, *answer] for prompt, answer in answers]
        futures = [self._reference.compute_logprobs(types.ModelInput.from_ints(ids)) for ids in whole]
        scored = [
            datum(ids, len(prompt), weights=[1.0] * len(answer))
            for ids, (prompt, answer) in zip(whole, answers, strict=True)
        ]
        policy = self._training.forward(scored, "cross_entropy").result()
        ratios = []
        for output, future, (prompt, _) in zip(policy.loss_fn_outputs, futures, answers, strict=True):
            known = [lp for lp in future.result()[len(prompt) :] if lp is not None]
            ratios.append(float(output["logprobs"].to_numpy()[len(prompt) - 1 :].sum()) - sum(known))
        data = []
        for place, (ids, (prompt, answer)) in enumerate(zip(whole, answers, strict=True)):
            margin = ratios[place - place % 2] - ratios[place - place % 2 + 1]
            slope = BETA / (1 + math.exp(BETA * margin)) * (-1 if place % 2 else 1)
            data.append(datum(ids, len(prompt), weights=[slope] * len(answer)))
        self._step(data, "cross_entropy")

    def _step(self, data: list[types.Datum], loss_fn: types.LossFnType) -> None:
        passed, stepped = self._training.forward_backward(data, loss_fn), self._training.optim_step(ADAM)
        passed.result()
        stepped.result()


def main() -> None:
    """Prints the seconds and CPU seconds of each measured step, and the peak memory, as JSON."""
    case, model, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    work = make_workload(tokenizer)
    with tempfile.TemporaryDirectory() as home:
        os.environ["TINKEX_DATA_DIR"] = home
        os.environ["TINKEX_MODELS"] = model
        with tinkex.ServiceClient(base_url="local") as service:
            run = getattr(Steps(service, tokenizer, work), case.removesuffix("_grouped"))
            run()
            wall, cpu = [], []
            for _ in range(steps):
                start, start_cpu = time.perf_counter(), time.process_time()
                run()
                wall.append(time.perf_counter() - start)
                cpu.append(time.process_time() - start_cpu)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"wall": wall, "cpu": cpu, "peak": peak}))


if __name__ == "__main__":
    main()
