"""Adapters trained with PEFT, uploaded to the engine, trained on and sampled from; and files that are not such adapters."""

from __future__ import annotations

import json
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
from tinkex.checkpoints.upload import AdapterFiles, upload_checkpoint
from tinkex.config import Config
from tinkex.engine.lanes.import_files import write_import
from tinkex.engine.model.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from tinkex.engine.trainer.checkpoint import verify_manifest
from tinkex.errors import InvalidInput

pytestmark = [
    pytest.mark.slow,
    # PEFT warns about tied embeddings and about saving them; nothing is merged here.
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::tinkex.errors.ExperimentalWarning"),
]

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


@pytest.fixture
def config(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Config:
    """The embedded engine, as a program with these variables uses it."""
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path_factory.getbasetemp() / "import-home"))
    monkeypatch.setenv("TINKEX_MODELS", f"tiny={tiny_model}")
    return Config.resolve(base_url="local")


@pytest.fixture
def service(config: Config) -> Iterator[tinkex.ServiceClient]:
    with tinkex.ServiceClient(config=config) as client:
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
def test_an_uploaded_adapter_is_sampled_and_trained_with_the_numbers_of_peft(
    settings: dict[str, Any],
    config: Config,
    service: tinkex.ServiceClient,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    expected = made_by_peft(tiny_model, tmp_path / "adapter", **settings)
    path = upload_checkpoint(tmp_path / "adapter", base_model="tiny", config=config).checkpoint_path
    sampler = service.create_sampling_client(model_path=path)
    sampled = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    np.testing.assert_allclose(np.array(sampled[1:], float), expected, atol=1e-4)

    training = service.create_training_client_from_state(path)
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


def test_an_import_is_written_with_a_manifest(tiny_model: Path, tmp_path: Path) -> None:
    made_by_peft(tiny_model, tmp_path / "adapter", target_modules=["up_proj"])
    lora = AdapterFiles.read(tmp_path / "adapter").lora
    assert lora == types.LoraConfig(rank=4, train_attn=False, train_unembed=False)
    write_import(tmp_path / "adapter", tmp_path / "out", tiny_model, "tiny", lora)
    verify_manifest(tmp_path / "out")
    assert json.loads((tmp_path / "out" / CONFIG_FILE).read_text())["base_model_name_or_path"] == "tiny"


class TestHostileSources:
    @pytest.fixture
    def adapter(self, tiny_model: Path, tmp_path: Path) -> Path:
        made_by_peft(tiny_model, tmp_path / "adapter", target_modules=["up_proj"])
        return tmp_path / "adapter"

    def rejected(self, source: Path, base: Path, words: str, **lora: Any) -> None:
        """The import is rejected, names the file and not the server's directories, and writes nothing."""
        target = source.parent / "out"
        target.mkdir()
        wanted = types.LoraConfig(**{"rank": 4, "train_attn": False, "train_unembed": False, **lora})
        with pytest.raises(InvalidInput, match=words) as caught:
            write_import(source, target, base, "tiny", wanted)
        assert str(caught.value).startswith((f"{CONFIG_FILE}: ", f"{WEIGHTS_FILE}: "))
        assert str(source.parent) not in str(caught.value)
        assert list(target.iterdir()) == []

    def test_a_config_that_is_not_json_is_rejected(self, adapter: Path, tiny_model: Path) -> None:
        (adapter / CONFIG_FILE).write_bytes(b"\x80\x04K\x01.")
        self.rejected(adapter, tiny_model, "cannot be read as JSON")

    def test_weights_that_are_a_pickle_are_rejected(self, adapter: Path, tiny_model: Path) -> None:
        torch.save({"a": torch.zeros(1)}, adapter / WEIGHTS_FILE)
        self.rejected(adapter, tiny_model, "cannot be read as safetensors")

    def test_numbers_that_are_not_finite_are_rejected(self, adapter: Path, tiny_model: Path) -> None:
        tensors = load_file(adapter / WEIGHTS_FILE)
        next(iter(tensors.values()))[0, 0] = float("nan")
        save_file(tensors, adapter / WEIGHTS_FILE)
        self.rejected(adapter, tiny_model, "not finite")

    def test_an_adapter_of_another_model_is_rejected(self, adapter: Path, tmp_path: Path) -> None:
        other = tiny_llama(tmp_path / "other", intermediate=96)
        self.rejected(adapter, other, "use the base model")

    def test_an_own_unembedding_is_rejected(self, tiny_model: Path, tmp_path: Path) -> None:
        made_by_peft(tiny_model, tmp_path / "adapter", target_modules=["lm_head"])
        tensors = load_file(tmp_path / "adapter" / WEIGHTS_FILE)
        tensors["base_model.model.lm_head.base_layer.weight"][5, 5] += 1
        save_file(tensors, tmp_path / "adapter" / WEIGHTS_FILE)
        self.rejected(tmp_path / "adapter", tiny_model, "its own unembedding")

    @pytest.mark.parametrize(("field", "value"), [("rank", 8), ("train_attn", True)])
    def test_other_settings_than_the_upload_has_are_rejected(
        self, adapter: Path, tiny_model: Path, field: str, value: object
    ) -> None:
        self.rejected(adapter, tiny_model, f"lora_config.{field} {value}", **{field: value})

    def test_a_config_that_is_not_plain_lora_is_rejected(self, adapter: Path, tiny_model: Path) -> None:
        config = json.loads((adapter / CONFIG_FILE).read_text())
        (adapter / CONFIG_FILE).write_text(json.dumps(config | {"use_dora": True}))
        self.rejected(adapter, tiny_model, "use_dora")
