"""Samples of the default model: the same numbers by the compiled core, by torch and in training."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.engine.kernels.cores import CORES
from tests.unit.engine.sampler.harness import sample
from tinkex.engine.config import EngineConfig
from tinkex.engine.model.catalog import DEFAULT_MODEL, LoadedModel, load_model
from tinkex.engine.sampler.sampler import Sampler
from tinkex.engine.trainer.trainer import Trainer, TrainJob
from tinkex.types import Datum, ForwardBackwardOutput, LoraConfig, ModelInput, TensorData

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not CORES, reason="the package was installed without its compiled core"),
]

TOLERANCE = 1e-4
TEXT = "The sea ran to the sky, and 12 ships sailed on it. The captain of the first one said:"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(DEFAULT_MODEL, EngineConfig().models_home)


def test_the_core_torch_and_the_trainer_agree_on_logprobs(loaded: LoadedModel) -> None:
    prompt = loaded.tokenizer.encode(TEXT)
    options = {"num_samples": 3, "max_tokens": 24, "seed": 7, "prompt_logprobs": True, "stop": []}
    by_core, by_torch = (
        sample(Sampler(loaded.transformer, loaded.tokenizer, compute=way), prompt, **options)
        for way in ("compiled", "torch")
    )
    trainer = Trainer(loaded.transformer)
    state = trainer.create(LoraConfig(rank=1, seed=0))  # a fresh adapter changes nothing
    for ours, theirs in zip(by_core.sequences, by_torch.sequences, strict=True):
        assert ours.tokens == theirs.tokens
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=TOLERANCE, rtol=0)
        tokens = [*prompt, *ours.tokens]
        datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": TensorData(tokens[1:], "int64")})
        [output] = trainer.run([TrainJob(state, [datum], "cross_entropy", backward=False)])
        assert isinstance(output, ForwardBackwardOutput), output
        assert by_core.prompt_logprobs_np is not None
        sampled = np.concatenate([by_core.prompt_logprobs_np[1:], ours.logprobs or []])
        trained = output.loss_fn_outputs[0]["logprobs"].to_numpy()
        np.testing.assert_allclose(sampled, trained, atol=TOLERANCE, rtol=0)
