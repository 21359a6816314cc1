"""Alternatives to prompt tokens: how often each is drawn against the model's own distribution."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tinker.proto.response_conv import deserialize_sample_response

from tests.numerics.test_sampling_distribution import assert_drawn_from, reference
from tests.unit.engine.sampler.harness import full_logits, one_thread, random_tokens, sample
from tinkex._wire.proto import encode_sample_response
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.sampler.logits import RowSettings
from tinkex.engine.sampler.sampler import Sampler
from tinkex.types import TensorData

__all__ = ["one_thread"]

PROMPT = random_tokens(40, seed=4)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_alternatives_are_drawn_from_the_scaled_distribution_of_every_position(
    tiny_model: Path, temperature: float
) -> None:
    model = load_transformer(tiny_model)
    sampler = Sampler(model, EngineTokenizer(tiny_model), prefill_chunk=16)
    # Top-k and top-p are for the samples: alternatives come from the whole distribution.
    options = {"max_tokens": 1, "temperature": temperature, "top_k": 2, "top_p": 0.5, "seed": 11}
    drawn = sample(sampler, PROMPT, prompt_alt_tokens_k=512, **options).prompt_alt_tokens
    assert drawn is not None
    logits = full_logits(model, PROMPT)[:-1].double().numpy()
    for row, tokens in enumerate(drawn.tokens.to_numpy()):
        assert_drawn_from(tokens, reference(logits[row], RowSettings(temperature)))


def test_the_official_package_reads_alternatives_and_sparse_targets(tiny_model: Path) -> None:
    sampler = Sampler(load_transformer(tiny_model), EngineTokenizer(tiny_model))
    targets = TensorData([7, 9], "int64", [39, 3], [0, 1] + [2] * 38, [2, 0])
    ours = sample(sampler, PROMPT, max_tokens=1, prompt_alt_tokens_k=3, target_prompt_logprobs=targets)
    theirs = deserialize_sample_response(encode_sample_response(ours))
    assert ours.prompt_alt_tokens is not None
    assert theirs.prompt_alt_tokens is not None
    assert theirs.prompt_alt_tokens.tokens.shape == [39, 3]
    assert theirs.prompt_alt_tokens.tokens.data == ours.prompt_alt_tokens.tokens.data
    assert theirs.prompt_alt_tokens.logprobs.data == pytest.approx(ours.prompt_alt_tokens.logprobs.data)
    assert ours.target_prompt_logprobs is not None
    assert theirs.target_prompt_logprobs is not None
    assert theirs.target_prompt_logprobs.sparse_col_indices == [2, 0]
    np.testing.assert_allclose(theirs.target_prompt_logprobs.data, ours.target_prompt_logprobs.array)
