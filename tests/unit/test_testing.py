"""What we give users for their own tests."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import tinkex
from tinkex.testing import MockTransport, Reply, Request, local_engine, reply
from tinkex.testing.tiny_model import write_tiny_model


def test_a_plain_function_can_be_a_server() -> None:
    transport = MockTransport(lambda _: reply({"supported_models": []}))
    service = tinkex.ServiceClient(transport=transport)
    assert service.get_server_capabilities().supported_models == []
    assert transport.paths == ["get_server_capabilities"]


def test_so_can_an_async_one() -> None:
    async def server(request: Request) -> Reply:
        await asyncio.sleep(0)
        return reply({"supported_models": [{"model_name": request.path}]})

    service = tinkex.ServiceClient(transport=MockTransport(server))
    assert service.get_server_capabilities().supported_models[0].model_name is not None


def test_errors_of_the_function_reach_the_client() -> None:
    def server(_: Request) -> Reply:
        raise LookupError("oops")

    with pytest.raises(LookupError, match="oops"):
        tinkex.ServiceClient(transport=MockTransport(server)).get_server_capabilities()


def test_replies_are_json_or_protobuf() -> None:
    assert reply({"a": None}).body == b'{"a":null}'
    assert reply({"a": 1}).headers["content-type"] == "application/json"
    assert reply(b"\x01").headers["content-type"] == "application/x-protobuf"
    assert reply(status=503, headers={"retry-after": "1"}).headers["retry-after"] == "1"
    assert reply(status=503).body == b""


@pytest.mark.slow
def test_a_real_engine_on_a_tiny_model_is_one_line_away() -> None:
    with local_engine() as engine:
        with engine.service() as service:
            training = service.create_lora_training_client(engine.base_model, rank=4, seed=1)
            tokenizer = training.get_tokenizer()
            tokens = tokenizer.encode("The sea is blue.")
            assert tokenizer.decode(tokens) == "The sea is blue."
            datum = tinkex.Datum(tinkex.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
            losses = []
            for _ in range(4):
                losses.append(
                    training.forward_backward([datum], "cross_entropy").result(60).metrics["loss:sum"]
                )
                training.optim_step(tinkex.AdamParams(learning_rate=1e-2)).result(60)
            assert losses[-1] < losses[0]
            path = training.save_state("kept").result(60).path
        # the engine outlives a client: what one saved the next finds
        with engine.service() as service:
            again = service.create_training_client_from_state(path)
            loss = again.forward([datum], "cross_entropy").result(60).metrics["loss:sum"]
            assert loss < losses[0]
        assert [run.base_model for run in engine.rest().iter_training_runs()] == [engine.base_model] * 2
        home = engine.home
    assert not home.exists()


def test_the_state_stays_where_the_user_sets_it(tmp_path: Path, tiny_model: Path) -> None:
    for expected in (1, 2):
        with (
            local_engine(tiny_model, name="my/model", home=tmp_path / "state") as engine,
            engine.service() as service,
        ):
            service.create_lora_training_client("my/model", rank=2)
            assert len(list(engine.rest().iter_training_runs())) == expected


@pytest.mark.slow
def test_the_fixtures_work_in_a_project_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tinkex.testing.fixtures"]\n')
    (tmp_path / "test_mine.py").write_text(
        "def test_one(tinkex_engine, tinkex_service):\n"
        "    run = tinkex_service.create_lora_training_client(tinkex_engine.base_model, rank=2)\n"
        "    assert run.get_info().lora_rank == 2\n\n"
        "def test_two(tinkex_engine, tinkex_service):\n"
        "    assert tinkex_service.get_server_capabilities().supported_models\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_a_tiny_model_is_the_same_everywhere(tmp_path: Path) -> None:
    first, second = write_tiny_model(tmp_path / "a"), write_tiny_model(tmp_path / "b")
    names = {file.name for file in first.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
