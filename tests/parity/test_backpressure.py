"""Clients of a server with small shares: they wait, get everything, and receive the true reason."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tinker
import uvicorn

import tinkex
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the official client leaves sockets to the garbage collector


@contextmanager
def serving(home: Path, model: Path, **shares: float) -> Iterator[dict[str, str]]:
    """A server in this process with small shares, and how to reach it."""
    engine = Engine(EngineConfig(home=home, models={"tiny/llama": str(model)}, **shares))  # type: ignore[arg-type]
    engine.start()
    server = uvicorn.Server(
        uvicorn.Config(build_app(engine), port=0, lifespan="off", ws="none", log_config=None)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield {"base_url": f"http://127.0.0.1:{port}", "api_key": engine.api_key}
    server.should_exit = True
    engine.end_waits()
    thread.join(30)
    engine.close()


@pytest.fixture(scope="module")
def login(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server where a user may have four operations waiting and two runs."""
    home = tmp_path_factory.mktemp("tight")
    with serving(home, tiny_model, max_pending_operations=4, max_live_runs_per_user=2) as login:
        yield login


@pytest.mark.slow
@pytest.mark.parametrize("package", [tinker, tinkex], ids=lambda p: p.__name__)
def test_more_than_fits_simultaneously_arrives_in_the_end(package: Any, login: dict[str, str]) -> None:
    types = package.types
    with package.ServiceClient(**login) as service:
        sampler = service.create_sampling_client(base_model="tiny/llama")
        params = types.SamplingParams(max_tokens=4, stop=[])
        futures = [sampler.sample(types.ModelInput.from_ints([5 + n]), 1, params) for n in range(12)]
        assert all(len(future.result(timeout=90).sequences[0].tokens) == 4 for future in futures)


def test_a_run_too_many_is_a_typed_error_that_says_what_to_do(login: dict[str, str]) -> None:
    with tinkex.ServiceClient(config=tinkex.Config.resolve(**login, max_retries=0)) as service:
        runs = [service.create_lora_training_client("tiny/llama", rank=2) for _ in range(2)]
        with pytest.raises(tinkex.RateLimitError, match="unload") as rejected:
            service.create_lora_training_client("tiny/llama", rank=2)
        assert rejected.value.response.headers["retry-after"] == "5"
        assert rejected.value.body["queue_state"] == "paused_rate_limit"
        assert (
            runs[0]
            .forward_backward(
                [
                    tinkex.types.Datum(
                        tinkex.types.ModelInput.from_ints([5, 6]),
                        {"target_tokens": [6, 7], "weights": [1.0, 1.0]},
                    )
                ],
                "cross_entropy",
            )
            .result(60)
        )


@pytest.mark.slow
@pytest.mark.parametrize("package", [tinker, tinkex], ids=lambda p: p.__name__)
def test_who_is_too_fast_waits_and_gets_everything(package: Any, tiny_model: Path, tmp_path: Path) -> None:
    types = package.types
    with (
        serving(tmp_path, tiny_model, max_tokens_per_s_per_user=10) as login,
        package.ServiceClient(**login) as service,
    ):
        training = service.create_lora_training_client("tiny/llama", rank=2, seed=1)
        inputs = {"target_tokens": list(range(6, 66))}
        datum = types.Datum(model_input=types.ModelInput.from_ints(list(range(5, 65))), loss_fn_inputs=inputs)
        passes = [training.forward_backward([datum], "cross_entropy") for _ in range(2)]
        assert all(one.result(timeout=90).metrics["loss:sum"] > 0 for one in passes)
        sampler = service.create_sampling_client(base_model="tiny/llama")
        params = types.SamplingParams(max_tokens=9, stop=[])
        futures = [sampler.sample(types.ModelInput.from_ints([5 + n]), 1, params) for n in range(3)]
        assert all(len(future.result(timeout=90).sequences[0].tokens) == 9 for future in futures)


@pytest.mark.slow
@pytest.mark.parametrize("package", [tinker, tinkex], ids=lambda p: p.__name__)
def test_sampling_from_a_deleted_snapshot_is_a_410_and_the_run_continues(
    package: Any, tiny_model: Path, tmp_path: Path
) -> None:
    types = package.types
    prompt, params = types.ModelInput.from_ints([5, 6]), types.SamplingParams(max_tokens=2, stop=[])
    settings = {"newest_snapshots_kept": 1, "snapshot_idle_s": 0.01, "maintenance_interval_s": 0.05}
    with serving(tmp_path, tiny_model, **settings) as login, package.ServiceClient(**login) as service:
        run = service.create_lora_training_client("tiny/llama", rank=2)
        old = run.save_weights_and_get_sampling_client()
        run.optim_step(types.AdamParams()).result(timeout=60)
        new = run.save_weights_and_get_sampling_client()
        deadline = time.monotonic() + 60
        while len(list((tmp_path / "engine" / "snapshots").iterdir())) > 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(package.APIStatusError, match="newer ones of its run exist") as rejected:
            old.sample(prompt, 1, params).result(timeout=60)
        assert rejected.value.status_code == 410
        assert len(new.sample(prompt, 1, params).result(timeout=60).sequences[0].tokens) == 2
        assert run.optim_step(types.AdamParams()).result(timeout=60) is not None


@pytest.mark.slow
@pytest.mark.parametrize("package", [tinker, tinkex], ids=lambda p: p.__name__)
def test_a_save_over_the_disk_quota_waits_until_something_is_deleted(
    package: Any, tiny_model: Path, tmp_path: Path
) -> None:
    with (
        serving(tmp_path, tiny_model, max_disk_bytes_per_user=70_000) as login,
        package.ServiceClient(**login) as service,
    ):
        run = service.create_lora_training_client("tiny/llama", rank=2)
        first, second = (run.save_state(name).result(timeout=60).path for name in ("first", "second"))
        waiting = run.save_state("third")
        with pytest.raises(TimeoutError):
            waiting.result(timeout=1)
        rest = tinkex.RestClient(**login)
        rest.delete_checkpoint_from_tinker_path(first).result(timeout=60)
        rest.delete_checkpoint_from_tinker_path(second).result(timeout=60)
        assert waiting.result(timeout=90).path.endswith("third")
