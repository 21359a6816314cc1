"""What the sampler's tests share: jobs with defaults, a loop to the end, and the plain full forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.attention import Attend, packed_causal
from tinkex.engine.model.lora import Adapter, LoraRows, LoraSpec
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.sampler.job import SampleJob
from tinkex.engine.sampler.sampler import Sampler
from tinkex.errors import TinkexError
from tinkex.types import SampleResponse, SamplingParams

_ids = count()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A tiny model's matrices are too small to share: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def job(
    prompt: Sequence[int], *, adapter: Adapter | None = None, num_samples: int = 1, **options: Any
) -> SampleJob:
    """A job for ``prompt``; sampling parameters and job fields are distinguished by name."""
    params = {name: options.pop(name) for name in SamplingParams.__struct_fields__ if name in options}
    request_id = options.pop("request_id", f"req-{next(_ids)}")
    return SampleJob(
        request_id=request_id,
        adapter=adapter,
        prompt_P=np.array(prompt, np.int32),
        num_samples=num_samples,
        params=SamplingParams(**params),
        sequence_ids=[f"{request_id}-{index}" for index in range(num_samples)],
        **options,
    )


def finish(sampler: Sampler, jobs: Sequence[SampleJob] = (), max_steps: int = 20_000) -> dict[str, Any]:
    """Adds the jobs and steps until nothing is left; results by request id."""
    for each in jobs:
        sampler.add(each)
    results: dict[str, SampleResponse | TinkexError] = {}
    for _ in range(max_steps):
        if not sampler.busy:
            return results
        results.update(sampler.step())
    raise AssertionError(f"still busy after {max_steps} steps")


def sample(sampler: Sampler, prompt: Sequence[int], **options: Any) -> SampleResponse:
    """One request, to its end, alone."""
    [result] = finish(sampler, [job(prompt, **options)]).values()
    assert isinstance(result, SampleResponse), result
    return result


def full_logits(model: Transformer, tokens: Sequence[int], adapter: Adapter | None = None) -> torch.Tensor:
    """Logits after every token, by one forward without any cache."""
    tokens_T = torch.tensor(tokens)
    lora = None if adapter is None else LoraRows([(adapter, len(tokens))])
    with torch.no_grad():
        hidden_TD = model.hidden(
            tokens_T, torch.arange(len(tokens)), packed_causal([len(tokens)], model.arch), lora
        )
        return model.logits(hidden_TD, lora)


def trained_adapter(model: Transformer, rank: int, seed: int, **flags: Any) -> Adapter:
    """An adapter that changes the model's output: B is not zero, as after training."""
    adapter = Adapter.create(model.arch, LoraSpec(rank=rank, seed=seed, **flags))
    noise = torch.randn(adapter.layout.num_params, generator=torch.Generator().manual_seed(seed))
    return adapter.with_params(adapter.params + 0.05 * noise)


def random_tokens(length: int, seed: int, vocab: int = 512) -> list[int]:
    """A prompt of tokens that are not special."""
    return np.random.default_rng(seed).integers(3, vocab, length).tolist()


class ScriptedModel(Transformer):
    """A model whose next token is written down: after position i it says ``script[i + 1]``, whatever it reads."""

    def __init__(self, arch: Architecture, script: Sequence[int]) -> None:
        super().__init__(arch, embedding_VD=torch.zeros(arch.vocab_size, 1), layers=[], norm_D=torch.zeros(1))
        self.script = list(script)
        self.rows_per_pass: list[int] = []
        self.segments_per_pass: list[int] = []

    def hidden(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend, lora: LoraRows | None = None
    ) -> torch.Tensor:
        self.rows_per_pass.append(len(tokens_T))
        self.segments_per_pass.append(0 if lora is None else len(lora.segments))
        return positions_T[:, None].float()

    def logits(self, hidden_TD: torch.Tensor, lora: LoraRows | None = None) -> torch.Tensor:
        said = [self.script[min(int(position) + 1, len(self.script) - 1)] for position in hidden_TD[:, 0]]
        logits_TV = torch.zeros(len(said), self.arch.vocab_size)
        logits_TV[torch.arange(len(said)), said] = 50.0
        return logits_TV
