"""How often tokens are drawn against how often they should be."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.unit.engine.sampler.harness import finish, full_logits, job, one_thread, random_tokens, sample
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.sampler.logits import RowSettings, draw, sample_rng
from tinkex.engine.sampler.sampler import Sampler

pytestmark = pytest.mark.slow

__all__ = ["one_thread"]

NUM_DRAWS = 20_000
SETTINGS = [
    RowSettings(),
    RowSettings(0.5),
    RowSettings(2.0),
    RowSettings(top_k=5),
    RowSettings(top_p=0.7),
    RowSettings(0.8, top_p=0.95),
    RowSettings(1.3, top_k=20, top_p=0.9),
    RowSettings(0.05),
    RowSettings(0.7, top_k=10),
    RowSettings(top_k=40, top_p=0.6),
    RowSettings(3.0, top_p=0.999),
]


def reference(logits: npt.NDArray[np.float64], settings: RowSettings) -> npt.NDArray[np.float64]:
    """The distribution by the definitions: scale, keep the top k, keep the nucleus that holds p."""
    scaled = np.exp((logits - logits.max()) / settings.temperature)
    probabilities = scaled / scaled.sum()
    order = np.argsort(-probabilities, kind="stable")
    if settings.top_k != -1:
        probabilities[order[settings.top_k :]] = 0
        probabilities /= probabilities.sum()
    held = 0.0
    for place, token in enumerate(order):
        if held >= settings.top_p:
            probabilities[order[place:]] = 0
            break
        held += probabilities[token]
    return probabilities / probabilities.sum()


def assert_drawn_from(tokens: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> None:
    """Pearson's chi-square at one in ten thousand; tokens expected fewer than ten times count as one cell."""
    observed = np.bincount(tokens, minlength=len(expected)).astype(float)
    assert observed[expected == 0].sum() == 0
    wanted = expected * len(tokens)
    common = wanted >= 10
    cells = [
        (observed[common], wanted[common]),
        (observed[~common].sum(keepdims=True), wanted[~common].sum(keepdims=True)),
    ]
    statistic = sum(float(((o - w) ** 2 / np.maximum(w, 1e-9)).sum()) for o, w in cells if w.sum() > 0)
    freedom = int(common.sum()) + int(wanted[~common].sum() > 0) - 1
    # Wilson and Hilferty: the cube root of a chi-square is close to normal; 3.72 cuts off one in ten thousand.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-6
    assert statistic <= limit, (statistic, limit, freedom)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_drawn_frequencies_are_those_of_the_distribution(settings: RowSettings) -> None:
    logits = 2 * torch.randn(300, generator=torch.Generator().manual_seed(0))
    uniforms = np.random.default_rng(5).random(NUM_DRAWS)
    tokens = [
        draw(logits.expand(len(part), -1), [settings] * len(part), part.tolist()).tokens_B
        for part in np.split(uniforms, 20)
    ]
    assert_drawn_from(torch.cat(tokens).numpy(), reference(logits.double().numpy(), settings))


@pytest.mark.parametrize("index", [0, 3])
def test_samples_of_different_seeds_are_independent_draws(index: int) -> None:
    """Seeds that follow each other, as programs choose them, and the samples of each."""
    logits = 2 * torch.randn(300, generator=torch.Generator().manual_seed(0))
    uniforms = [sample_rng(seed, index).random() for seed in range(NUM_DRAWS // 4)]
    drawn = draw(logits.expand(len(uniforms), -1), [RowSettings()] * len(uniforms), uniforms).tokens_B
    assert_drawn_from(drawn.numpy(), reference(logits.double().numpy(), RowSettings()))
    pairs = np.floor(np.array(uniforms) * 8).astype(np.int64)
    assert_drawn_from(pairs[:-1] * 8 + pairs[1:], np.full(64, 1 / 64))  # nor does one seed foretell the next


@pytest.mark.slow
def test_requests_with_seeds_of_their_own_are_drawn_from_the_models_distribution(tiny_model: Path) -> None:
    model = load_transformer(tiny_model)
    prompt = random_tokens(12, 1)
    settings = RowSettings(0.8, top_k=12, top_p=0.9)
    options = {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p}
    jobs = [job(prompt, seed=seed, max_tokens=1, stop=[], **options) for seed in range(1500)]
    results = finish(Sampler(model, EngineTokenizer(tiny_model)), jobs)
    tokens = np.array([results[each.request_id].sequences[0].tokens[0] for each in jobs])
    assert_drawn_from(tokens, reference(full_logits(model, prompt)[-1].double().numpy(), settings))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[1], SETTINGS[3], SETTINGS[4]], ids=str)
def test_the_samples_of_one_request_are_drawn_from_the_models_distribution(
    tiny_model: Path, settings: RowSettings
) -> None:
    model = load_transformer(tiny_model)
    prompt = random_tokens(12, 1)
    response = sample(
        Sampler(model, EngineTokenizer(tiny_model)),
        prompt,
        num_samples=4000,
        seed=17,
        max_tokens=1,
        stop=[],
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
    )
    tokens = np.array([sequence.tokens[0] for sequence in response.sequences])
    assert_drawn_from(tokens, reference(full_logits(model, prompt)[-1].double().numpy(), settings))


@pytest.mark.slow
def test_the_second_token_depends_on_the_first_as_it_should(tiny_model: Path) -> None:
    """Frequencies after a cached step: second tokens that followed the commonest first token."""
    model = load_transformer(tiny_model)
    prompt = random_tokens(12, 1)
    response = sample(
        Sampler(model, EngineTokenizer(tiny_model)),
        prompt,
        num_samples=3000,
        seed=1,
        max_tokens=2,
        stop=[],
        top_k=3,
    )
    pairs = np.array([sequence.tokens for sequence in response.sequences])
    first = int(np.bincount(pairs[:, 0]).argmax())
    expected = reference(full_logits(model, [*prompt, first])[-1].double().numpy(), RowSettings(top_k=3))
    assert_drawn_from(pairs[pairs[:, 0] == first, 1], expected)
