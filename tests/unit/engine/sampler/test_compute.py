from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.engine.kernels.cores import CORES
from tests.unit.engine.sampler.harness import ScriptedModel, finish, job, random_tokens, trained_adapter
from tinkex.engine.config import EngineConfig
from tinkex.engine.lanes.in_process import LocalBackend
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.sampler.compute import choose_compute
from tinkex.engine.sampler.sampler import Sampler
from tinkex.errors import SetupError
from tinkex.types import StructuredOutput

has_core = pytest.mark.skipif(not CORES, reason="the package was installed without its compiled core")


def test_torch_is_used_where_it_is_configured(model: Transformer, tokenizer: EngineTokenizer) -> None:
    assert Sampler(model, tokenizer, compute="torch").computes_with == "torch (as set)"


@has_core
def test_the_core_is_used_where_there_is_one(model: Transformer, tokenizer: EngineTokenizer) -> None:
    fastest = next(iter(CORES))
    assert Sampler(model, tokenizer).computes_with == f"compiled ({fastest})"
    assert Sampler(model, tokenizer, compute="compiled").computes_with == f"compiled ({fastest})"


def test_a_model_with_its_own_forward_pass_is_computed_by_torch(model: Transformer) -> None:
    script = ScriptedModel(model.arch, [9])
    assert choose_compute(script).description == "torch (ScriptedModel has its own forward pass)"
    with pytest.raises(SetupError, match="ScriptedModel"):
        choose_compute(script, "compiled")


def test_a_compute_that_does_not_exist_is_rejected(model: Transformer) -> None:
    with pytest.raises(SetupError, match="'magic'"):
        choose_compute(model, "magic")


def test_the_engine_setting_chooses(tiny_model: Path, tmp_path: Path) -> None:
    facts = LocalBackend(EngineConfig(home=tmp_path, sampler_compute="torch")).load(str(tiny_model))
    assert facts.computes_with == "torch (as set)"


def test_the_engine_setting_for_memory_reaches_the_sampler(tiny_model: Path, tmp_path: Path) -> None:
    from tinkex.errors import InvalidInput

    facts = LocalBackend(EngineConfig(home=tmp_path, kv_cache_bytes=1000)).load(str(tiny_model))
    with pytest.raises(InvalidInput, match="1,000 bytes"):
        facts.samples.check(job(random_tokens(50, 1), max_tokens=1))


@pytest.mark.slow
@has_core
def test_both_computes_draw_the_same_samples(model: Transformer, tokenizer: EngineTokenizer) -> None:
    adapters = [None, trained_adapter(model, 4, 1), trained_adapter(model, 9, 2)]
    jobs = [
        job(
            random_tokens(10 + 13 * n, n),
            adapter=adapters[n % 3],
            num_samples=1 + n % 3,
            max_tokens=40,
            seed=n,
            stop=[],
            temperature=[1.0, 0.0, 0.7][n % 3],
            top_p=[1.0, 0.9][n % 2],
            min_p=[None, 0.05, 0.3, 0.0][n % 4],
            presence_penalty=[None, 0.5][n % 2],
            frequency_penalty=[None, -0.5, 0.2][n % 3],
            repetition_penalty=[None, 1.3][n % 2],
            logit_bias=[None, {7: 3.0, 9: -100.0}][n % 2],
            structured_output=[None, None, StructuredOutput(regex="[a-z ]{5,30}")][n % 3],
            prompt_logprobs=n % 2 == 0,
            topk_sample_logprobs=3,
        )
        for n in range(9)
    ]
    compiled, plain = (finish(Sampler(model, tokenizer, compute=way), jobs) for way in ("compiled", "torch"))
    for each in jobs:
        ours, theirs = compiled[each.request_id], plain[each.request_id]
        for one, other in zip(ours.sequences, theirs.sequences, strict=True):
            assert one.tokens == other.tokens
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        if each.prompt_logprobs:
            assert ours.prompt_logprobs[1:] == pytest.approx(theirs.prompt_logprobs[1:], abs=1e-4)
