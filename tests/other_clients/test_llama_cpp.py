"""Exported GGUF files in llama.cpp: the tokens and logprobs that the engine has for the merged model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import tiny_llama
from tests.other_clients.environments import run_python
from tests.unit.engine.sampler.harness import sample
from tinkex.engine.config import EngineConfig
from tinkex.engine.model.attention import packed_causal
from tinkex.engine.model.catalog import DEFAULT_MODEL, load_model
from tinkex.engine.model.gguf_export import export_gguf
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.lora import Adapter, LoraRows, LoraSpec
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.sampler.sampler import Sampler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first run installs llama.cpp

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "llama with biases, untied": {"tie": False, "config": {"attention_bias": True, "mlp_bias": True}},
    "llama with wide heads": {"head_dim": 32},
    "llama 3 rope": {
        "config": {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        }
    },
    "linear rope": {"config": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}},
    "yarn": {
        "family": "qwen2",
        "config": {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
        },
    },
    "mistral": {"family": "mistral"},
    "mistral with a window": {"family": "mistral", "config": {"sliding_window": 256}},
    "qwen2": {"family": "qwen2", "tie": False},
    "qwen3": {"family": "qwen3", "head_dim": 32},
}
TEXT = "What is the capital of France? Two plus two is four. "
MAX_TOKENS = 32
TOLERANCE = 0.02
"""llama.cpp rounds activations to 16 bits before it multiplies them with F16 weights."""


def trained(model: Transformer) -> Adapter:
    adapter = Adapter.create(model.arch, LoraSpec(rank=4, seed=0))
    noise = torch.randn(adapter.params.shape, generator=torch.Generator().manual_seed(3))
    return adapter.with_params(adapter.params + 0.05 * noise)


def logprobs(model: Transformer, adapter: Adapter, tokens: Sequence[int]) -> Tensor:
    """Of every next token, at every position, by one plain forward pass."""
    lora = LoraRows([(adapter, len(tokens))])
    positions, attend = torch.arange(len(tokens)), packed_causal([len(tokens)], model.arch)
    with torch.no_grad():
        hidden = model.hidden(torch.tensor(tokens), positions, attend, lora)
        return model.logits(hidden, lora).log_softmax(-1)


def in_llama_cpp(folder: Path, jobs: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs))
    replies: list[list[dict[str, Any]]] = run_python("llama_cpp", None, str(file))
    return replies


@pytest.fixture(scope="module")
def replies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[dict[str, Any]]]]:
    """Every variant with an adapter merged into it, and what llama.cpp samples from the file."""
    folder = tmp_path_factory.mktemp("gguf")
    jobs, bases = [], {}
    for number, (name, options) in enumerate(VARIANTS.items()):
        base = bases[name] = tiny_llama(folder / f"base-{number}", **options)
        prompts = [EngineTokenizer(base).encode(TEXT * count) for count in (1, 2, 4)]
        file = export_gguf(base, folder / f"{number}.gguf", trained(load_transformer(base)))
        requests = [{"prompt": prompt, "n_predict": MAX_TOKENS} for prompt in prompts]
        jobs.append({"model": str(file), "requests": requests})
    found = in_llama_cpp(folder, jobs)
    return {name: (bases[name], reply) for name, reply in zip(VARIANTS, found, strict=True)}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_in_llama_cpp_has_the_logprobs_of_its_adapter(
    name: str, replies: dict[str, tuple[Path, list[dict[str, Any]]]]
) -> None:
    base, samples = replies[name]
    model = load_transformer(base)
    adapter, tokenizer = trained(model), EngineTokenizer(base)
    for count, reply in zip((1, 2, 4), samples, strict=True):
        prompt, tokens = tokenizer.encode(TEXT * count), reply["tokens"]
        assert len(tokens) > 1
        ours = logprobs(model, adapter, [*prompt, *tokens])[len(prompt) - 1 : -1]
        of_token = ours.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        theirs = torch.tensor(reply["logprobs"])
        torch.testing.assert_close(of_token[: len(theirs)], theirs, atol=TOLERANCE, rtol=0)
        assert (ours.max(-1).values - of_token).max() < 2 * TOLERANCE, "not the most likely token"


PROMPTS = [
    "SELECT * FROM users WHERE",
    "The alphabet: A, B, C, D,",
    "The planets of the solar system are Mercury,",
]
"""The two most likely tokens differ by 0.07 or more at every position, so that rounding does not decide."""


@pytest.mark.real_model
def test_the_default_model_samples_the_same_tokens_in_llama_cpp(tmp_path: Path) -> None:
    loaded = load_model(DEFAULT_MODEL, EngineConfig().models_home)
    file = export_gguf(loaded.directory, tmp_path / "default.gguf")
    messages = [{"role": "user", "content": "Name three colours."}]
    requests = [{"prompt": prompt, "n_predict": MAX_TOKENS} for prompt in PROMPTS]
    [replies] = in_llama_cpp(
        tmp_path, [{"model": str(file), "requests": [*requests, {"messages": messages, "n_predict": 16}]}]
    )
    sampler = Sampler(loaded.transformer, loaded.tokenizer)
    prompts = [loaded.tokenizer.encode(prompt) for prompt in PROMPTS]
    prompts.append(loaded.tokenizer.apply_chat_template(messages))
    for prompt, reply in zip(prompts, replies, strict=True):
        ours = sample(sampler, prompt, max_tokens=len(reply["tokens"]), temperature=0.0, stop=[])
        assert reply["tokens"] == list(ours.sequences[0].tokens)
        assert reply["num_prompt_tokens"] == len(prompt), (
            "the file's tokenizer or chat template is another one"
        )
    assert [len(reply["tokens"]) for reply in replies[:3]] == [MAX_TOKENS] * 3
