"""What programs written for the official SDK rely on of a server: twenty-one traps, one test for each at least.

Where the client matters it is the official one, unmodified, against `tinkex serve`; where the wire does, the calls are
made one by one. The last test checks that no number is without a test.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyrage
import pytest
import tinker
from safetensors.numpy import load_file
from tinker import types

from tests.engines import started_engine
from tests.official_process import official_command
from tests.servers import ServedEngine
from tests.unit.engine.api.asgi import PROTO, Client
from tests.unit.engine.api.test_sampling import request, sampler
from tests.unit.engine.api.test_training import optim_step, pass_body, send_pass
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine

MODEL = "tiny/llama"
EOS = 2

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the official client leaves sockets to the garbage collector


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    names = {
        "tiny": str(tiny_model),
        "Qwen/Qwen3.5-4B": str(tiny_model),
        "moonshotai/Kimi-K2.6": str(tiny_model),
    }
    config = EngineConfig(
        home=tmp_path_factory.mktemp("compatible"),
        models=names,
        long_poll_s=0.2,
        snapshots_in_memory=2,
        session_grace_s=0.0,
    )
    with started_engine(config) as started:
        yield started


@pytest.fixture
def wire(engine: Engine) -> Client:
    """The calls themselves."""
    return Client(build_app(engine), engine.api_key)


@pytest.fixture(scope="module")
def service(served_engine: ServedEngine) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=served_engine.url, api_key=served_engine.key) as client:
        yield client


@pytest.fixture(scope="module")
def sampling(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=MODEL)


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    given = {"target_tokens": tokens[1:], **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given)


def sentence(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 200, length + 1).tolist()


def draw(client: tinker.SamplingClient, number: int = 1, **params: Any) -> list[types.SampledSequence]:
    settings = types.SamplingParams(**{"max_tokens": 8, "stop": [], **params})
    return client.sample(types.ModelInput.from_ints([5, 6, 7]), number, settings).result(60).sequences


def test_01_a_sample_is_answered_immediately_with_the_ids_of_its_sequences(
    engine: Engine, wire: Client
) -> None:
    sampler_id = sampler(wire)
    with engine.paused():
        submitted = wire.post("asample", request(sampler_id, num_samples=3))
    assert len(set(submitted.json["sample_sequence_ids"])) == 3
    wire.result(submitted)


def test_02_results_have_the_forms_that_clients_read(engine: Engine, wire: Client) -> None:
    run = wire.create()
    with engine.paused():
        submitted = send_pass(wire, pass_body(run, 1))
        pending = wire.post("retrieve_future", {"request_id": submitted.json["request_id"]})
    assert (pending.status, pending.json["type"]) == (408, "try_again")
    assert wire.result(submitted, accept=PROTO).headers["content-type"] == PROTO
    assert (
        wire.result(wire.post("optim_step", optim_step(run, 2))).headers["content-type"] == "application/json"
    )
    wrong = {"model_id": run, "path": "x", "seq_id": 4, "type": "save_weights"}
    first = wire.post("save_weights", {**wrong, "seq_id": 3})
    failed = wire.result(wire.post("save_weights", wrong))
    wire.result(first)
    assert failed.json["category"] == "user"
    assert failed.json["error"]
    engine.store.futures.drop("local", [submitted.json["request_id"]])
    assert wire.post("retrieve_future", {"request_id": submitted.json["request_id"]}).status == 410


def test_03_chunks_arrive_lowest_last_and_retries_repeat_their_number(wire: Client) -> None:
    run = wire.create()
    later = [send_pass(wire, pass_body(run, seq_id)) for seq_id in (2, 3)]
    first = send_pass(wire, pass_body(run, 1))
    again = send_pass(wire, pass_body(run, 1))
    assert again.json["request_id"] == first.json["request_id"]
    assert all(wire.result(each, accept=PROTO).status == 200 for each in (first, *later))


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"])
def test_04_metric_names_have_one_colon_and_the_loss_is_there(
    service: tinker.ServiceClient, loss_fn: types.LossFnType
) -> None:
    training = service.create_lora_training_client(MODEL, rank=2)
    inputs = {} if loss_fn == "cross_entropy" else {"logprobs": [-1.0] * 4, "advantages": [1.0] * 4}
    metrics = training.forward_backward([datum(sentence(1, 4), **inputs)], loss_fn).result().metrics
    assert "loss:sum" in metrics
    assert all(name.count(":") == 1 for name in metrics)


def test_05_paths_have_three_parts_and_ids_go_raw_into_addresses(wire: Client) -> None:
    run = wire.create()
    save = {"model_id": run, "path": "0001", "seq_id": 1, "overwrite": False, "type": "save_weights"}
    path = wire.result(wire.post("save_weights", save)).json["path"]
    assert re.fullmatch(r"tinker://[^/]+:train:\d+/weights/0001", path)
    assert ":" in run
    (listed,) = wire.get(f"training_runs/{run}/checkpoints").json["checkpoints"]
    assert listed["checkpoint_id"] == "weights/0001"
    for wrong in (f"{path}/x", path.removesuffix("/0001"), path.replace("/weights/", "/other/")):
        assert wire.post("weights_info", {"tinker_path": wrong}).status in {400, 404}


def test_06_a_step_without_gradient_works_and_passes_add_up(service: tinker.ServiceClient) -> None:
    one, two = (service.create_lora_training_client(MODEL, rank=2, seed=3) for _ in range(2))
    data = [datum(sentence(n, 6)) for n in range(2)]
    adam = types.AdamParams(learning_rate=1e-2)
    assert one.optim_step(adam).result().metrics is not None
    two.optim_step(adam).result()
    one.forward_backward(data, "cross_entropy").result()
    for each in data:
        two.forward_backward([each], "cross_entropy").result()
    norms = [run.optim_step(adam).result().metrics for run in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-4B", "moonshotai/Kimi-K2.6", "moonshotai/Kimi-K2.6:peft:512"])
def test_07_one_model_is_served_under_any_name(wire: Client, name: str) -> None:
    request = {
        "session_id": wire.session(),
        "model_seq_id": 0,
        "base_model": name,
        "lora_config": {"rank": 2},
    }
    run = wire.result(wire.post("create_model", request)).json["model_id"]
    assert wire.post("get_info", {"model_id": run}).json["model_data"]["model_name"] == name


def test_08_sampled_logprobs_are_scaled_and_computed_ones_are_not(sampling: tinker.SamplingClient) -> None:
    prompt = [5, 6, 7]
    (drawn,) = draw(sampling, temperature=0.5, max_tokens=1, seed=1)
    every = types.TensorData.from_numpy(np.arange(512).reshape(1, 512).repeat(3, axis=0))
    asked = types.ModelInput.from_ints([*prompt, *drawn.tokens])
    params = types.SamplingParams(max_tokens=1, stop=[])
    scores = sampling.sample(asked, 1, params, target_prompt_logprobs=every).result(60).target_prompt_logprobs
    assert scores is not None
    plain = scores.to_numpy()[-1] / 0.5
    expected = plain - np.log(np.exp(plain - plain.max()).sum()) - plain.max()
    assert drawn.logprobs == pytest.approx([expected[drawn.tokens[0]]], abs=1e-3)
    computed = sampling.compute_logprobs(asked).result(60)
    assert [value is None for value in computed] == [True, False, False, False]
    assert computed[-1] == pytest.approx(scores.to_numpy()[-1][drawn.tokens[0]], abs=1e-3)


@pytest.mark.slow
def test_09_stops_are_kept_and_the_end_token_stops_unless_disabled(
    sampling: tinker.SamplingClient, service: tinker.ServiceClient
) -> None:
    tokens = draw(sampling, temperature=0.0)[0].tokens
    stopped = draw(sampling, temperature=0.0, stop=[tokens[3]])[0]
    assert stopped.tokens == tokens[: tokens.index(tokens[3]) + 1]
    assert stopped.stop_reason == "stop"
    free = draw(sampling, 64, max_tokens=150, seed=4)
    assert {(len(each.tokens), each.stop_reason) for each in free} == {(150, "length")}
    assert any(EOS in each.tokens for each in free)
    with_text = draw(sampling, 64, max_tokens=150, seed=4, stop=["no such text"])
    ended = [each for each in with_text if each.stop_reason == "stop"]
    assert ended
    assert all(each.tokens[-1] == EOS for each in ended)


def test_10_a_seed_gives_different_sequences_that_come_again(sampling: tinker.SamplingClient) -> None:
    first, again = ([each.tokens for each in draw(sampling, 4, seed=11)] for _ in range(2))
    assert first == again
    assert len({tuple(tokens) for tokens in first}) == 4


def test_11_weights_are_any_numbers_and_logprobs_have_the_shape_of_the_targets(
    service: tinker.ServiceClient,
) -> None:
    training = service.create_lora_training_client(MODEL, rank=2)
    tokens = sentence(3, 4)

    def run(**inputs: Any) -> types.ForwardBackwardOutput:
        return training.forward([datum(tokens, **inputs)], "cross_entropy").result()

    plain, ones = run(), run(weights=[1.0] * 4)
    assert plain.metrics["loss:sum"] == pytest.approx(ones.metrics["loss:sum"])
    weights = [-2.5, 0.0, 1e3, 0.25]
    lp = np.array(plain.loss_fn_outputs[0]["logprobs"].data)
    assert run(weights=weights).metrics["loss:sum"] == pytest.approx(-(lp * weights).sum(), rel=1e-4)
    targets = np.array([[token, 9, 10] for token in tokens[1:]])
    wide = run(target_tokens=targets, weights=np.full((4, 3), 0.5, np.float32))
    got = wide.loss_fn_outputs[0]["logprobs"]
    assert (got.shape, got.dtype) == ([4, 3], "float32")
    assert got.to_numpy()[:, 0] == pytest.approx(lp, abs=1e-4)


def test_12_resuming_is_a_question_a_run_and_a_load(wire: Client) -> None:
    session = wire.session()
    run = wire.create(session, rank=4, train_unembed=False)
    wire.result(send_pass(wire, pass_body(run, 1)), accept=PROTO)
    wire.result(wire.post("optim_step", optim_step(run, 2)))
    save = {"model_id": run, "path": "mid", "seq_id": 3, "overwrite": False, "type": "save_weights"}
    path = wire.result(wire.post("save_weights", save)).json["path"]
    info = wire.post("weights_info", {"tinker_path": path}).json
    assert {k: info[k] for k in ("is_lora", "lora_rank", "train_attn", "train_mlp", "train_unembed")} == {
        "is_lora": True, "lora_rank": 4, "train_attn": True, "train_mlp": True, "train_unembed": False,
    }  # fmt: skip
    steps = []
    for number, optimizer in enumerate((True, False), 1):
        resumed = wire.create(session, number, rank=4, train_unembed=False)
        load = {
            "model_id": resumed,
            "seq_id": 1,
            "path": path,
            "optimizer": optimizer,
            "type": "load_weights",
        }
        wire.result(wire.post("load_weights", load))
        wire.result(send_pass(wire, pass_body(resumed, 2)), accept=PROTO)
        steps.append(
            wire.result(wire.post("optim_step", optim_step(resumed, 3))).json["metrics"]["step:unique"]
        )
    assert steps == [2, 1]


def test_13_a_new_run_has_the_metadata_of_its_client_only(
    service: tinker.ServiceClient, served_engine: ServedEngine
) -> None:
    rest = tinker.RestClient(base_url=served_engine.url, api_key=served_engine.key)
    parent = service.create_lora_training_client(MODEL, rank=2, user_metadata={"generation": "1"})
    path = parent.save_state("parent").result().path
    child = service.create_training_client_from_state(path, user_metadata={"generation": "2"})
    silent = service.create_training_client_from_state(path)
    assert rest.get_training_run_by_tinker_path(path).result().user_metadata == {"generation": "1"}
    assert rest.get_training_run(child.model_id).result().user_metadata == {"generation": "2"}
    assert not rest.get_training_run(silent.model_id).result().user_metadata


def test_14_saves_of_one_name_coexist_while_training_continues(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(MODEL, rank=2)
    passes = [training.forward_backward([datum(sentence(1, 4))], "cross_entropy")]
    saves = [training.save_state("000004", ttl_seconds=3600), training.save_weights_for_sampler("000004")]
    passes.append(training.forward_backward([datum(sentence(1, 4))], "cross_entropy"))
    kinds = [save.result().path.split("/")[-2] for save in saves]
    assert kinds == ["weights", "sampler_weights"]
    losses = [each.result().metrics["loss:sum"] for each in passes]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_15_unnamed_snapshots_do_not_pile_up(engine: Engine, wire: Client) -> None:
    session = wire.session()
    run = wire.create(session)
    samplers = []
    for number in range(5):
        wire.result(send_pass(wire, pass_body(run, 3 * number + 1)), accept=PROTO)
        wire.result(wire.post("optim_step", optim_step(run, 3 * number + 2)))
        save = {"model_id": run, "sampling_session_seq_id": number, "seq_id": 3 * number + 3}
        reported = wire.result(wire.post("save_weights_for_sampler", save)).json
        samplers.append(reported["sampling_session_id"])
    answers = [wire.result(wire.post("asample", request(each)), accept=PROTO) for each in samplers]
    assert all(answer.headers["content-type"] == PROTO for answer in answers), "an evicted one is read again"
    folder = engine.store.root / "snapshots"
    assert len(list(folder.iterdir())) >= 5
    before = len(list(folder.iterdir()))
    wire.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
    engine.run_retention()
    assert len(list(folder.iterdir())) == before - 5


def test_16_rollouts_of_single_samples_share_the_decode_batch(engine: Engine, wire: Client) -> None:
    sampler_id = sampler(wire)
    with engine.paused():
        waiting = [wire.post("asample", request(sampler_id, n, max_tokens=20)) for n in range(16)]
    for each in waiting:
        wire.result(each)
    rows = engine.store.finished.after(sampler_id, 0, 0, 100)
    assert len(rows) == 16
    assert max(row.started_at or 0 for row in rows) < min(row.finished_at for row in rows)


def test_17_a_prompt_may_come_in_hundreds_of_chunks(sampling: tinker.SamplingClient) -> None:
    tokens = sentence(8, 300)
    chunks = [types.EncodedTextChunk(tokens=[token]) for token in tokens]
    apart = sampling.compute_logprobs(types.ModelInput(chunks=chunks)).result(60)
    whole = sampling.compute_logprobs(types.ModelInput.from_ints(tokens)).result(60)
    assert apart[1:] == pytest.approx(whole[1:], abs=1e-4)


def test_18_addresses_are_absolute_and_need_no_headers(
    service: tinker.ServiceClient, served_engine: ServedEngine
) -> None:
    training = service.create_lora_training_client(MODEL, rank=2)
    path = training.save_weights_external("plain").result().path
    rest = tinker.RestClient(base_url=served_engine.url, api_key=served_engine.key)
    for url in rest.get_external_weights_urls(path).result().urls.values():
        assert url.startswith(served_engine.url)
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert answer.status == 200


@pytest.mark.slow
def test_19_the_official_command_downloads_a_training_checkpoint(
    service: tinker.ServiceClient, served_engine: ServedEngine, tmp_path: Path
) -> None:
    training = service.create_lora_training_client(MODEL, rank=2)
    path = training.save_state("wanted").result().path
    environment = {**os.environ, "TINKER_BASE_URL": served_engine.url, "TINKER_API_KEY": served_engine.key}
    options = ["-f", "json", "checkpoint", "download", path, "-o", str(tmp_path)]
    command = official_command("-m", "tinker.cli", *options)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.iterdir()
    assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    rest = tinker.RestClient(base_url=served_engine.url, api_key=served_engine.key)
    listed = rest.list_user_checkpoints(limit=1000).result().checkpoints
    assert "external_weights/download" not in {each.checkpoint_id for each in listed}, (
        "the export was deleted"
    )
    identity = pyrage.x25519.Identity.generate()
    secret = training.save_weights_external("secret", age_encryption_recipients=[str(identity.to_public())])
    urls = rest.get_external_weights_urls(secret.result().path).result().urls
    assert set(urls) == {"adapter_config.json.age", "adapter_model.safetensors.age"}
    with urllib.request.urlopen(urls["adapter_config.json.age"], timeout=20) as answer:
        assert json.loads(pyrage.decrypt(answer.read(), [identity]))["r"] == 2


def test_20_exported_tensors_have_the_names_and_shapes_that_tools_merge(
    service: tinker.ServiceClient, served_engine: ServedEngine, tiny_model: Path, tmp_path: Path
) -> None:
    training = service.create_lora_training_client(MODEL, rank=3)
    path = training.save_weights_external("names").result().path
    rest = tinker.RestClient(base_url=served_engine.url, api_key=served_engine.key)
    for name, url in rest.get_external_weights_urls(path).result().urls.items():
        urllib.request.urlretrieve(url, tmp_path / name)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 32)
    adapter, base = (
        load_file(tmp_path / "adapter_model.safetensors"),
        load_file(tiny_model / "model.safetensors"),
    )
    base.setdefault("lm_head.weight", base["model.embed_tokens.weight"])
    assert "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight" in adapter
    assert adapter["base_model.model.model.unembed_tokens.lora_B.weight"].shape[1] == 3
    for name, tensor in adapter.items():
        # As merging tools do it: the prefix goes, and the unembedding is the head of the model.
        plain = name.removeprefix("base_model.model.").replace("model.unembed_tokens", "lm_head")
        rows, columns = base[re.sub(r"\.lora_[AB]", "", plain)].shape
        assert tensor.shape == ((3, columns) if "lora_A" in name else (rows, 3)), name


@pytest.mark.slow
def test_21_tokenizers_are_found_by_directory_and_by_base_model(
    service: tinker.ServiceClient, sampling: tinker.SamplingClient, served_engine: ServedEngine
) -> None:
    training = service.create_lora_training_client(MODEL, rank=2)
    directory = training.get_info().model_data.tokenizer_id
    assert directory is not None
    assert (Path(directory) / "tokenizer.json").is_file()
    assert training.get_tokenizer().encode("hello")
    rest = tinker.RestClient(base_url=served_engine.url, api_key=served_engine.key)
    assert rest.get_sampler(sampling._sampling_session_id).result().base_model == MODEL
    assert asyncio.run(sampling.get_base_model_async()) == MODEL


def test_every_number_has_a_test() -> None:
    numbers = {int(match[1]) for name in globals() if (match := re.match(r"test_(\d\d)_", name))}
    assert numbers == set(range(1, 22))
