"""Weights that need fewer bits than fp32 are packed, and give the same numbers to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.models import tiny_llama
from tests.unit.engine.kernels.cores import CORES
from tests.unit.engine.sampler.harness import random_tokens, trained_adapter
from tinkex.engine.kernels import Core
from tinkex.engine.kernels.layout import StorageFormat
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.sampler.compiled import CompiledCompute
from tinkex.engine.sampler.kv_cache import PromptKV
from tinkex.engine.sampler.packed_weights import pack_matrix, packed_weights, plain_weights

pytestmark = pytest.mark.skipif(not CORES, reason="the package was installed without its compiled core")

Floats = npt.NDArray[np.float32]


def blocks(shape: tuple[int, ...], seed: int) -> tuple[np.random.Generator, tuple[int, int]]:
    return np.random.default_rng(seed), (int(np.prod(shape)) // 32, 32)


def halves(values: npt.NDArray[np.float64]) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def q4_1(shape: tuple[int, ...], seed: int) -> Floats:
    rng, size = blocks(shape, seed)
    scale, low = halves(rng.normal(0, 0.01, (size[0], 1))), halves(rng.normal(0, 0.1, (size[0], 1)))
    codes = rng.integers(0, 16, size)
    codes[:, 0], codes[:, 1] = 0, 15
    return (np.abs(scale) * codes.astype(np.float32) + low).reshape(shape)


def q4_0(shape: tuple[int, ...], seed: int) -> Floats:
    rng, size = blocks(shape, seed)
    scale = halves(rng.normal(0, 0.02, (size[0], 1)))
    codes = rng.integers(0, 16, size)
    codes[:, 3] = 0
    codes[:, 4] = rng.integers(12, 16, size[0])
    return (scale * (codes - 8).astype(np.float32)).reshape(shape)


def q8_0(shape: tuple[int, ...], seed: int) -> Floats:
    rng, size = blocks(shape, seed)
    codes = rng.integers(-127, 128, size)
    codes[:, 5] = rng.choice([-127, 127, 126, 101], size[0])
    codes[:, 6] = 1
    return (halves(rng.normal(0, 0.001, (size[0], 1))) * codes.astype(np.float32)).reshape(shape)


def fp16(shape: tuple[int, ...], seed: int) -> Floats:
    values = halves(np.random.default_rng(seed).normal(0, 0.05, shape))
    values.flat[:4] = halves(np.array([6e-8, -1e-6, 65504, -0.0]))
    return values


def bf16(shape: tuple[int, ...], seed: int) -> Floats:
    values = np.random.default_rng(seed).normal(0, 0.05, shape).astype(np.float32)
    values.flat[:2] = 1e30, -1e-30
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def fp32(shape: tuple[int, ...], seed: int) -> Floats:
    return np.random.default_rng(seed).normal(0, 0.05, shape).astype(np.float32)


FORMS: dict[str, tuple[Callable[[tuple[int, ...], int], Floats], StorageFormat]] = {
    "q4_1": (q4_1, StorageFormat.Q4),
    "q4_0": (q4_0, StorageFormat.Q4),
    "q8_0": (q8_0, StorageFormat.Q8),
    "fp16": (fp16, StorageFormat.FP16),
    "bf16": (bf16, StorageFormat.BF16),
    "fp32": (fp32, StorageFormat.FP32),
}


@pytest.fixture(params=CORES)
def core(request: pytest.FixtureRequest) -> Core:
    return CORES[request.param]


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_is_kept_in_the_smallest_form_that_has_all_its_numbers(core: Core, form: str) -> None:
    make, expected = FORMS[form]
    assert pack_matrix(core, torch.from_numpy(make((75, 160), 1))).storage is expected


@pytest.mark.parametrize("form", ["q4_1", "q8_0", "fp16", "bf16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.12345678])
def test_one_number_that_does_not_fit_keeps_the_matrix_as_it_is(core: Core, form: str, bad: float) -> None:
    weight = torch.from_numpy(FORMS[form][0]((40, 64), 2))
    weight[39, 63] = bad
    packed = pack_matrix(core, weight)
    if form == "bf16" and not np.isfinite(bad):
        assert packed.storage is StorageFormat.BF16  # which has them too
    else:
        assert packed.storage is StorageFormat.FP32
        assert packed.data is weight


@pytest.mark.parametrize("inputs", [30, 33, 100])
def test_rows_that_are_not_whole_blocks_are_packed_number_by_number(core: Core, inputs: int) -> None:
    assert pack_matrix(core, torch.from_numpy(fp16((5, inputs), 1))).storage is StorageFormat.FP16
    assert pack_matrix(core, torch.zeros(5, inputs)).storage is StorageFormat.BF16


def quantise(model: Transformer, form: str) -> None:
    """Gives every matrix of a model numbers of one form."""
    make = FORMS[form][0]
    for number, layer in enumerate(model.layers):
        for weight in (layer.qkv_ED, layer.output_DHd, layer.gate_up_2FD, layer.down_DF):
            weight.copy_(torch.from_numpy(make(tuple(weight.shape), number)))
    model.embedding_VD.copy_(torch.from_numpy(make(tuple(model.embedding_VD.shape), 99)))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["q4_1", "q4_0", "q8_0", "fp16", "bf16"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden": 96, "heads": 3, "kv_heads": 1, "head_dim": 32, "intermediate": 224, "vocab": 530},
        {"hidden": 320, "heads": 2, "kv_heads": 2, "head_dim": 32, "intermediate": 64},
    ],
    ids=["narrow", "wide"],
)
def test_packed_weights_give_the_bits_that_plain_ones_give(
    core: Core, tmp_path: Path, form: str, sizes: dict[str, int]
) -> None:
    """For any number of rows, with and without an adapter."""
    model = load_transformer(tiny_llama(tmp_path / "model", seed=3, **sizes))
    quantise(model, form)
    packed, plain = CompiledCompute(model, core), CompiledCompute(model, core, pack=False)
    assert {m.storage for layer in packed_weights(model, core).layers for m in layer} == {FORMS[form][1]}
    adapter = trained_adapter(model, 4, 1)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 140):
        tokens = np.array(random_tokens(rows, rows), np.int32)
        segments = [(None, rows // 2), (adapter, rows - rows // 2)]
        found = []
        for compute in (packed, plain):
            kv = PromptKV(model.arch, model.dtype, rows)
            hidden = compute.prefill(tokens, [(kv, rows)], segments)
            found.append((hidden, kv.kv_L2KPd, compute.logits(hidden, segments)))
        for one, other in zip(*found, strict=True):
            assert torch.isfinite(one).all()
            assert torch.equal(one, other)


def test_samplers_of_a_model_share_what_was_packed(core: Core, tiny_model: Path) -> None:
    model = load_transformer(tiny_model)
    quantise(model, "q8_0")
    packed = packed_weights(model, core)
    assert packed_weights(model, core) is packed
    plain = sum(matrix.data.nbytes for layer in plain_weights(model).layers for matrix in layer)
    assert 0 < packed.num_bytes < 0.3 * (plain + model.unembedding_VD.nbytes)
