"""Imported weights: the files of an upload are validated, converted to the engine's format and written as a checkpoint.

The two files are read where the server has received them. Pickles are never read. The checkpoint has the tensor names of
``save_weights_external``, and a manifest like any other.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.engine.model.adapter_config import CONFIG_FILE, WEIGHTS_FILE, AdapterConfig
from tinkex.errors import InvalidInput
from tinkex.types import LoraConfig

if TYPE_CHECKING:
    from tinkex.engine.model.lora import Adapter

FILES = (CONFIG_FILE, WEIGHTS_FILE)
"""The files of exported weights."""


def write_import(source: Path, directory: Path, base: Path, base_model: str, lora: LoraConfig) -> None:
    """Write the adapter in ``source`` as a checkpoint into ``directory``.

    ``base`` is the directory of the adapter's base model, and ``base_model`` the name under which it is served. Raises
    ``InvalidInput``, which names the file, if the adapter cannot be honoured exactly, or does not have the rank and the
    modules of ``lora``.
    """
    from tinkex.engine.model.adapter_files import TINKER_UNEMBED_PATH, load_adapter, save_adapter
    from tinkex.engine.model.stored_tensors import read_architecture
    from tinkex.engine.trainer.checkpoint import write_manifest

    arch = read_architecture(base)
    file = CONFIG_FILE
    try:
        AdapterConfig.read(source)
        file = WEIGHTS_FILE
        adapter = load_adapter(source, arch)
        _check_finite(adapter)
        _check_unembedding(source / WEIGHTS_FILE, base, tied=arch.tie_embeddings)
        _check_settings(adapter, lora)
    except InvalidInput as error:
        # Clients receive the id of the upload, which names its directory, and not the server's paths.
        raise InvalidInput(f"{file}: {str(error).replace(f'{source.parent}/', '')}") from error
    save_adapter(directory, adapter, base_model, unembed_path=TINKER_UNEMBED_PATH)
    write_manifest(directory)


def _check_finite(adapter: Adapter) -> None:
    if not bool(adapter.params.isfinite().all()):
        raise InvalidInput("it has weights that are not finite; upload an earlier checkpoint of the adapter")


def _check_settings(adapter: Adapter, lora: LoraConfig) -> None:
    """Raises ``InvalidInput`` for an adapter that is not what the upload was started for."""
    for field in ("rank", "train_unembed", "train_mlp", "train_attn"):
        found, wanted = getattr(adapter.spec, field), getattr(lora, field)
        if found != wanted:
            raise InvalidInput(
                f"the adapter has {field} {found}, and the upload was started with lora_config.{field} {wanted}; start it "
                "with the settings of the adapter"
            )


def _check_unembedding(weights: Path, base: Path, *, tied: bool) -> None:
    """Raises ``InvalidInput`` for an adapter with its own unembedding, unless that is the base model's."""
    from safetensors import safe_open

    from tinkex.engine.model.adapter_files import UNEMBED_BASE_NAMES
    from tinkex.engine.model.stored_tensors import StoredTensors

    with safe_open(weights, framework="pt") as file, ExitStack() as files:
        included = [name for name in file.keys() if name in UNEMBED_BASE_NAMES]  # noqa: SIM118 -- no mapping
        if not included:
            return
        theirs = file.get_tensor(included[0])
        stored = StoredTensors(base, files)
        ours = stored.read("embed_tokens.weight" if tied else "lm_head.weight", tuple(theirs.shape))
        # Either side can be rounded to a narrower type.
        if not (ours.to(theirs.dtype).equal(theirs) or theirs.to(ours.dtype).equal(ours)):
            raise InvalidInput(
                f"the adapter has its own unembedding ({included[0]}), which is not the base model's; upload it for the "
                "base it was trained on, or save it with save_embedding_layers=False"
            )
