from __future__ import annotations

import pytest

from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.known_models import KNOWN_MODELS, num_parameters

PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
}
"""The number of weights that the hub states for each."""


def test_every_known_model_is_one_that_the_engine_loads_and_has_its_published_size() -> None:
    counted = {one.name: num_parameters(Architecture.from_config(one.config)) for one in KNOWN_MODELS}
    assert counted == PUBLISHED


@pytest.mark.parametrize("known", KNOWN_MODELS, ids=lambda known: known.name)
def test_every_known_model_has_a_licence(known: object) -> None:
    assert getattr(known, "licence", None)
