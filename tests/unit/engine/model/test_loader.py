from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import tiny_llama
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.transformer import Transformer
from tinkex.errors import SetupError


def _all_weights(model: Transformer) -> list[torch.Tensor]:
    layers = [weight for layer in model.layers for weight in vars(layer).values() if weight is not None]
    return [model.embedding_VD, model.unembedding_VD, model.norm_D, *layers]


def _rewrite(
    directory: Path, change: dict[str, torch.Tensor | None], rename: tuple[str, str] | None = None
) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    if rename:
        tensors = {name.replace(*rename): tensor for name, tensor in tensors.items()}
    save_file(tensors, path)


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    whole = load_transformer(tiny_llama(tmp_path / "whole", tie=False))
    sharded = load_transformer(tiny_llama(tmp_path / "sharded", tie=False, num_shards=3))
    for one, other in zip(_all_weights(whole), _all_weights(sharded), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_weights_become_fp32(tmp_path: Path, dtype: str) -> None:
    model = load_transformer(tiny_llama(tmp_path / "model", dtype=dtype))
    whole = load_transformer(tiny_llama(tmp_path / "whole"))
    for half, full in zip(_all_weights(model), _all_weights(whole), strict=True):
        assert half.dtype == torch.float32
        assert torch.equal(half, full.to(getattr(torch, dtype)).float())


def test_a_prefix_of_model_may_be_missing(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    expected = load_transformer(directory)
    _rewrite(directory, {}, rename=("model.", ""))
    for one, other in zip(_all_weights(expected), _all_weights(load_transformer(directory)), strict=True):
        assert torch.equal(one, other)


def test_redundant_tensors_of_old_checkpoints_are_accepted(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    head = load_transformer(directory).embedding_VD.clone()
    _rewrite(
        directory, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": head}
    )
    model = load_transformer(directory)
    assert model.unembedding_VD is model.embedding_VD


@pytest.mark.parametrize(
    "head",
    [torch.zeros(512, 64), torch.zeros(511, 64), torch.zeros(512, 64).half()],
    ids=["values", "shape", "type"],
)
def test_a_head_beside_the_one_it_is_tied_to_is_rejected(tmp_path: Path, head: torch.Tensor) -> None:
    """Versions of transformers disagree on which of the two such a model uses."""
    directory = tiny_llama(tmp_path / "model")
    _rewrite(directory, {"lm_head.weight": head})
    with pytest.raises(SetupError, match=r"another one in lm_head\.weight; set tie_word_embeddings to false"):
        load_transformer(directory)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    _rewrite(
        directory,
        {"model.layers.1.mlp.up_proj.weight": None, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)},
    )
    with pytest.raises(SetupError) as failure:
        load_transformer(directory)
    assert "lacks layers.1.mlp.up_proj.weight" in str(failure.value)
    assert "unexpected layers.0.self_attn.q_proj.bias" in str(failure.value)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    _rewrite(directory, {"model.layers.1.mlp.up_proj.weight": torch.zeros(4, 5)})
    with pytest.raises(
        SetupError, match=r"up_proj\.weight .* has shape \(4, 5\), and config\.json needs \(128, 64\)"
    ):
        load_transformer(directory)


def test_a_tensor_of_another_dtype_is_named_with_it(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    _rewrite(directory, {"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    with pytest.raises(SetupError, match=r"model\.norm\.weight .* int8"):
        load_transformer(directory)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model", num_shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SetupError, match="model-00002-of-00002"):
        load_transformer(directory)


def test_an_index_cannot_reach_out_of_its_directory(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model", num_shards=2)
    tiny_llama(tmp_path / "other")
    index = {"weight_map": {"model.norm.weight": "../other/model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SetupError, match=r"which .* does not have"):
        load_transformer(directory)


@pytest.mark.parametrize("weight_map", [{"model.norm.weight": 5}, {"model.norm.weight": None, "b": "c"}])
def test_an_index_without_file_names_is_rejected(tmp_path: Path, weight_map: dict[str, object]) -> None:
    directory = tiny_llama(tmp_path / "model", num_shards=2)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(SetupError, match="has no weight_map"):
        load_transformer(directory)


def test_a_weight_that_is_stored_twice_is_named(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    _rewrite(directory, {"norm.weight": torch.ones(64)})  # beside model.norm.weight
    with pytest.raises(SetupError, match=r"norm\.weight twice"):
        load_transformer(directory)

    shards = tiny_llama(tmp_path / "shards", num_shards=2)
    first, last = sorted(shards.glob("model-*.safetensors"))
    stale = next(iter(load_file(first).items()))
    save_file({**load_file(last), stale[0]: stale[1] + 1}, last)
    with pytest.raises(SetupError, match=rf"{stale[0].removeprefix('model.')} twice"):
        load_transformer(shards)


def test_a_truncated_file_is_a_setup_error(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(SetupError, match="cannot be read as safetensors"):
        load_transformer(directory)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", None, r"it has no config\.json"),
        ("config.json", "{", "cannot be read as JSON"),
        ("config.json", "[" * 100_000, "cannot be read as JSON"),
        ("config.json", "[]", "must contain a JSON object"),
        ("model.safetensors", None, "only safetensors weights are read"),
    ],
)
def test_a_directory_that_is_not_a_model_is_a_setup_error(
    tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    directory = tiny_llama(tmp_path / "model")
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_text(content)
    with pytest.raises(SetupError, match=words):
        load_transformer(directory)


@pytest.mark.parametrize("field", ["intermediate_size", "num_attention_heads", "vocab_size"])
def test_a_size_that_the_weights_do_not_have_takes_no_memory(tmp_path: Path, field: str) -> None:
    directory = tiny_llama(tmp_path / "model", config={}, kv_heads=1)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {field: 2**31 - 1}))
    with pytest.raises(SetupError, match=r"and config\.json needs"):
        load_transformer(directory)
