"""Adapters trained with PEFT, brought into the engine, trained on and sampled from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tinkex
from tests.models import tiny_llama
from tinkex import types
from tinkex._transport.local import LocalTransport
from tinkex.engine.api.embedded import EmbeddedEngine, open_embedded
from tinkex.engine.checkpoint_import import import_adapter, import_checkpoint
from tinkex.engine.model.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from tinkex.engine.trainer.checkpoint import verify_manifest
from tinkex.errors import InvalidInput

# PEFT warns about tied embeddings and about saving them; nothing is merged here.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning:peft")]

TOKENS = np.random.default_rng(3).integers(5, 500, 20).tolist()


def made_by_peft(base: Path, directory: Path, **settings: Any) -> list[float]:
    """Saves a random adapter, and returns the logprobs of ``TOKENS`` after the first under it."""
    options = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", **settings}
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    model.eval().save_pretrained(directory)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([TOKENS])).logits[0], -1)
    return logprobs[:-1].gather(1, torch.tensor(TOKENS)[1:, None])[:, 0].tolist()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def embedded(home: Path, tiny_model: Path) -> Iterator[EmbeddedEngine]:
    opened = open_embedded(home, {"tiny": str(tiny_model)})
    yield opened
    opened.close()


@pytest.fixture
def service(embedded: EmbeddedEngine, home: Path, tiny_model: Path) -> Iterator[tinkex.ServiceClient]:
    transport = LocalTransport(home, {"tiny": str(tiny_model)})
    with tinkex.ServiceClient(base_url="local", transport=transport) as client:
        yield client


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1], "use_rslora": True},
        {"rank_pattern": {"q_proj": 7, "up_proj": 1}, "alpha_pattern": {"down_proj": 50}},
        {"target_modules": ["o_proj", "lm_head"]},
    ],
    ids=str,
)
def test_an_imported_adapter_is_sampled_and_trained_with_the_numbers_of_peft(
    settings: dict[str, Any],
    embedded: EmbeddedEngine,
    service: tinkex.ServiceClient,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    expected = made_by_peft(tiny_model, tmp_path / "adapter", **settings)
    row = import_checkpoint(
        embedded.engine.store, tmp_path / "adapter", base=tiny_model, base_model="tiny", name="mine"
    )
    sampler = service.create_sampling_client(model_path=row.path)
    sampled = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    np.testing.assert_allclose(np.array(sampled[1:], float), expected, atol=1e-4)

    training = service.create_training_client_from_state(row.path)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs={"target_tokens": TOKENS[1:]}
    )
    before = training.forward([datum], "cross_entropy").result()
    np.testing.assert_allclose(before.loss_fn_outputs[0]["logprobs"].data, expected, atol=1e-4)
    for _ in range(3):
        training.forward_backward([datum], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2))
    after = training.forward([datum], "cross_entropy").result()
    assert after.metrics["loss:sum"] < before.metrics["loss:sum"]


def test_an_imported_checkpoint_is_listed_with_its_run(
    embedded: EmbeddedEngine, service: tinkex.ServiceClient, tiny_model: Path, tmp_path: Path
) -> None:
    made_by_peft(tiny_model, tmp_path / "adapter")
    row = import_checkpoint(
        embedded.engine.store,
        tmp_path / "adapter",
        base=tiny_model,
        base_model="tiny",
        user_metadata={"from": "elsewhere"},
    )
    rest = service.create_rest_client()
    run = rest.get_training_run(row.run_id).result()
    assert (run.base_model, run.lora_rank, run.user_metadata) == ("tiny", 4, {"from": "elsewhere"})
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == row.path
    with pytest.raises(tinkex.APIStatusError, match="no optimizer state"):
        service.create_training_client_from_state_with_optimizer(row.path)
    rest.delete_checkpoint_from_tinker_path(row.path).result()
    assert rest.list_checkpoints(row.run_id).result().checkpoints == []


def test_an_imported_directory_is_sealed_and_says_how_to_train_it(tiny_model: Path, tmp_path: Path) -> None:
    made_by_peft(tiny_model, tmp_path / "adapter", target_modules=["up_proj"])
    imported = import_adapter(tmp_path / "adapter", tmp_path / "out", base=tiny_model, base_model="tiny")
    verify_manifest(tmp_path / "out")
    assert imported.lora == types.LoraConfig(rank=4, train_attn=False, train_unembed=False)
    assert imported.scale == 3.0
    assert imported.declared_base == str(tiny_model)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        CONFIG_FILE,
        WEIGHTS_FILE,
        "manifest.json",
    ]
    with pytest.raises(InvalidInput, match="exists already"):
        import_adapter(tmp_path / "adapter", tmp_path / "out", base=tiny_model, base_model="tiny")


class TestHostileSources:
    @pytest.fixture
    def adapter(self, tiny_model: Path, tmp_path: Path) -> Path:
        made_by_peft(tiny_model, tmp_path / "adapter", target_modules=["up_proj"])
        return tmp_path / "adapter"

    def refused(self, source: Path, base: Path, words: str) -> None:
        """The import is rejected and leaves nothing behind."""
        target = source.parent / "out" / "checkpoint"
        with pytest.raises(InvalidInput, match=words):
            import_adapter(source, target, base=base, base_model="tiny")
        assert list(target.parent.iterdir()) == []

    @pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
    def test_links_are_not_followed(self, adapter: Path, tiny_model: Path, name: str) -> None:
        (adapter / name).rename(adapter.parent / "secret")
        (adapter / name).symlink_to(adapter.parent / "secret")
        self.refused(adapter, tiny_model, "is a link")

    def test_a_link_to_a_directory_is_not_followed(self, adapter: Path, tiny_model: Path) -> None:
        (adapter.parent / "link").symlink_to(adapter)
        self.refused(adapter.parent / "link", tiny_model, "not a link")

    def test_a_pickle_is_rejected_and_named(self, adapter: Path, tiny_model: Path) -> None:
        (adapter / WEIGHTS_FILE).rename(adapter / "adapter_model.bin")
        self.refused(adapter, tiny_model, r"adapter_model\.bin")

    def test_a_file_that_is_not_regular_is_rejected(self, adapter: Path, tiny_model: Path) -> None:
        (adapter / CONFIG_FILE).unlink()
        (adapter / CONFIG_FILE).mkdir()
        self.refused(adapter, tiny_model, "not a regular file")
        (adapter / CONFIG_FILE).rmdir()
        os.mkfifo(adapter / CONFIG_FILE)
        self.refused(adapter, tiny_model, "not a regular file")

    def test_an_enormous_config_is_rejected(self, adapter: Path, tiny_model: Path) -> None:
        with (adapter / CONFIG_FILE).open("ab") as file:
            file.truncate(2 << 20)
        self.refused(adapter, tiny_model, "bytes, and at most")

    def test_numbers_that_are_not_finite_are_rejected(self, adapter: Path, tiny_model: Path) -> None:
        tensors = load_file(adapter / WEIGHTS_FILE)
        next(iter(tensors.values()))[0, 0] = float("nan")
        save_file(tensors, adapter / WEIGHTS_FILE)
        self.refused(adapter, tiny_model, "not finite")

    def test_an_adapter_of_another_model_is_rejected(self, adapter: Path, tmp_path: Path) -> None:
        other = tiny_llama(tmp_path / "other", intermediate=96)
        self.refused(adapter, other, "use the base model")

    def test_an_own_unembedding_is_rejected(self, tiny_model: Path, tmp_path: Path) -> None:
        made_by_peft(tiny_model, tmp_path / "adapter", target_modules=["lm_head"])
        tensors = load_file(tmp_path / "adapter" / WEIGHTS_FILE)
        tensors["base_model.model.lm_head.base_layer.weight"][5, 5] += 1
        save_file(tensors, tmp_path / "adapter" / WEIGHTS_FILE)
        self.refused(tmp_path / "adapter", tiny_model, "its own unembedding")

    @pytest.mark.parametrize("name", ["../escape", "a/b", "..", "", "/etc/passwd"])
    def test_a_name_cannot_lead_out_of_the_data_directory(
        self, adapter: Path, tiny_model: Path, embedded: EmbeddedEngine, name: str
    ) -> None:
        with pytest.raises(InvalidInput, match="not a valid checkpoint name"):
            import_checkpoint(embedded.engine.store, adapter, base=tiny_model, base_model="tiny", name=name)

    def test_a_config_that_is_not_plain_lora_leaves_nothing(self, adapter: Path, tiny_model: Path) -> None:
        config = json.loads((adapter / CONFIG_FILE).read_text())
        (adapter / CONFIG_FILE).write_text(json.dumps(config | {"use_dora": True}))
        self.refused(adapter, tiny_model, "use_dora")
