"""Models that are known to work, and those on this machine, with their size, memory and licence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.cache import ModelCache
from tinkex.engine.model.catalog import DEFAULT_MODEL, find_local
from tinkex.engine.model.config_fields import read_json
from tinkex.errors import SetupError

__all__ = ["KNOWN_MODELS", "KnownModel", "ListedModel", "list_known_models", "num_parameters"]

_DOWNLOAD_BYTES, _MEMORY_BYTES = 2, 4  # of a weight: bfloat16 on the hub, fp32 in memory


@dataclass(frozen=True)
class KnownModel:
    """A model on the hub: its licence, and the fields of its ``config.json`` that determine its size."""

    name: str
    licence: str
    config: Mapping[str, Any]
    stores_tied_head: bool = False
    """Whether the hub's files contain the embedding a second time, as the head."""


@dataclass(frozen=True)
class ListedModel:
    """A model that is known or on this machine."""

    model: str
    family: str
    num_parameters: int
    context: int
    download_bytes: int | None
    """The size of its weights on the hub; None for a model that is only here."""
    memory_bytes: int
    """What its weights take in memory; a run adds its adapter, optimizer state and activations."""
    licence: str | None
    """None if it is not known here."""
    tested: bool
    """Whether the tests of this package run it; otherwise it is known by its architecture."""
    directory: str | None
    """Where it is on this machine; None if it must be downloaded."""


def num_parameters(arch: Architecture) -> int:
    """The number of weights of a model; tied embeddings count once.

    Example:
        >>> num_parameters(read_architecture(Path("models/SmolLM2-135M-Instruct")))
        134515008
    """
    hidden, inner = arch.hidden_size, arch.intermediate_size
    q_size, kv_size = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    layer = 2 * hidden  # the norms
    layer += hidden * (q_size + 2 * kv_size) + q_size * hidden + 3 * hidden * inner
    layer += (q_size + 2 * kv_size) * arch.attention_bias + hidden * arch.output_bias
    layer += (2 * inner + hidden) * arch.mlp_bias + 2 * arch.head_dim * arch.qk_norm
    embeddings = arch.vocab_size * hidden * (1 if arch.tie_embeddings else 2)
    return arch.num_layers * layer + embeddings + hidden


def list_known_models(models_home: Path, configured: Mapping[str, str] | None = None) -> list[ListedModel]:
    """The known models, and below them those on this machine that are not among them.

    ``configured`` maps further names to their sources, as ``$TINKEX_MODELS`` does.

    Example:
        >>> [one.model for one in list_known_models(Path("models")) if one.tested]
        ['HuggingFaceTB/SmolLM2-135M-Instruct']
    """
    sources = configured or {}
    listed = []
    for known in KNOWN_MODELS:
        arch = Architecture.from_config(known.config)
        directory = find_local(sources.get(known.name, known.name), models_home)
        stored = num_parameters(arch) + arch.vocab_size * arch.hidden_size * known.stores_tied_head
        listed.append(_listed(known.name, arch, directory, stored * _DOWNLOAD_BYTES, known.licence))
    cache = ModelCache(models_home)
    keys = sorted(path.name for path in models_home.iterdir()) if models_home.is_dir() else []
    here = {key.replace("--", "/"): cache.find(key) for key in keys}
    here |= {name: find_local(source, models_home) for name, source in sorted(sources.items())}
    names = {known.name for known in KNOWN_MODELS}
    for name, directory in here.items():
        if directory is None or name in names:
            continue
        try:
            arch = Architecture.from_config(read_json(directory / "config.json"))
        except SetupError:  # not a model that the engine loads
            continue
        listed.append(_listed(name, arch, directory, None, None))
    return listed


def _listed(
    name: str, arch: Architecture, directory: Path | None, download_bytes: int | None, licence: str | None
) -> ListedModel:
    count = num_parameters(arch)
    return ListedModel(
        model=name,
        family=arch.family,
        num_parameters=count,
        context=arch.max_context,
        download_bytes=download_bytes,
        memory_bytes=count * _MEMORY_BYTES,
        licence=licence,
        tested=name == DEFAULT_MODEL,
        directory=None if directory is None else str(directory),
    )


def _config(
    family: str,
    layers: int,
    hidden: int,
    inner: int,
    heads: tuple[int, int],
    vocab: int,
    context: int,
    *,
    tie: bool,
    head_dim: int | None = None,
) -> dict[str, Any]:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": tie,
        **({} if head_dim is None else {"head_dim": head_dim}),
        **({"sliding_window": None} if family == "mistral" else {}),
    }


_APACHE = "Apache-2.0"
KNOWN_MODELS: tuple[KnownModel, ...] = (
    KnownModel(DEFAULT_MODEL, _APACHE, _config("llama", 30, 576, 1536, (9, 3), 49152, 8192, tie=True)),
    KnownModel(
        "HuggingFaceTB/SmolLM2-360M-Instruct",
        _APACHE,
        _config("llama", 32, 960, 2560, (15, 5), 49152, 8192, tie=True),
    ),
    KnownModel(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        _APACHE,
        _config("llama", 24, 2048, 8192, (32, 32), 49152, 8192, tie=True),
    ),
    KnownModel(
        "Qwen/Qwen2.5-0.5B-Instruct",
        _APACHE,
        _config("qwen2", 24, 896, 4864, (14, 2), 151936, 32768, tie=True),
    ),
    KnownModel(
        "Qwen/Qwen2.5-1.5B-Instruct",
        _APACHE,
        _config("qwen2", 28, 1536, 8960, (12, 2), 151936, 32768, tie=True),
    ),
    KnownModel(
        "Qwen/Qwen2.5-7B-Instruct",
        _APACHE,
        _config("qwen2", 28, 3584, 18944, (28, 4), 152064, 32768, tie=False),
    ),
    KnownModel(
        "Qwen/Qwen3-0.6B",
        _APACHE,
        _config("qwen3", 28, 1024, 3072, (16, 8), 151936, 40960, tie=True, head_dim=128),
        stores_tied_head=True,
    ),
    KnownModel(
        "Qwen/Qwen3-1.7B",
        _APACHE,
        _config("qwen3", 28, 2048, 6144, (16, 8), 151936, 40960, tie=True, head_dim=128),
        stores_tied_head=True,
    ),
    KnownModel(
        "Qwen/Qwen3-4B",
        _APACHE,
        _config("qwen3", 36, 2560, 9728, (32, 8), 151936, 40960, tie=True, head_dim=128),
    ),
    KnownModel(
        "Qwen/Qwen3-8B",
        _APACHE,
        _config("qwen3", 36, 4096, 12288, (32, 8), 151936, 40960, tie=False, head_dim=128),
    ),
    KnownModel(
        "meta-llama/Llama-3.2-1B-Instruct",
        "Llama 3.2 Community",
        _config("llama", 16, 2048, 8192, (32, 8), 128256, 131072, tie=True),
    ),
    KnownModel(
        "meta-llama/Llama-3.2-3B-Instruct",
        "Llama 3.2 Community",
        _config("llama", 28, 3072, 8192, (24, 8), 128256, 131072, tie=True),
    ),
    KnownModel(
        "meta-llama/Llama-3.1-8B-Instruct",
        "Llama 3.1 Community",
        _config("llama", 32, 4096, 14336, (32, 8), 128256, 131072, tie=False),
    ),
    KnownModel(
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        _APACHE,
        _config("llama", 22, 2048, 5632, (32, 4), 32000, 2048, tie=False),
    ),
    KnownModel(
        "mistralai/Mistral-7B-Instruct-v0.3",
        _APACHE,
        _config("mistral", 32, 4096, 14336, (32, 8), 32768, 32768, tie=False),
    ),
)
"""Dense models of the supported families, the small ones of each first."""
