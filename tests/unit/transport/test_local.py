"""The engine in this process, reached without a socket."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tinkex._transport.base import Request
from tinkex._transport.local import LocalTransport
from tinkex.errors import APITimeoutError, ClosedError

pytest.importorskip("torch")


async def test_requests_reach_the_application_with_path_query_and_body(
    tmp_path: Path, tiny_model: Path
) -> None:
    transport = LocalTransport(tmp_path, {"tiny": str(tiny_model)})
    try:
        health = await transport.send(Request("GET", "/api/v1/healthz"))
        assert (health.status, health.body) == (200, b'{"status":"ok"}')
        assert health.headers["content-type"].startswith("application/json")
        created = await transport.send(
            Request("POST", "/api/v1/create_session", {"content-type": "application/json"}, b'{"tags":["a"]}')
        )
        assert b"session_id" in created.body
        file = await transport.send(
            Request("GET", "/api/v1/tokenizers/tokenizer.json", query={"model": "tiny"})
        )
        assert file.body == (tiny_model / "tokenizer.json").read_bytes()
        missing = await transport.send(Request("GET", "/api/v1/nowhere"))
        assert missing.status == 404
    finally:
        await transport.close()
    with pytest.raises(ClosedError, match="engine"):
        await transport.send(Request("GET", "/api/v1/healthz"))


async def test_a_poll_that_is_held_too_long_is_a_timeout(tmp_path: Path, tiny_model: Path) -> None:
    transport = LocalTransport(tmp_path, {"tiny": str(tiny_model)})

    async def send(path: str, body: dict[str, Any], timeout: float = 30.0) -> Any:
        request = Request(
            "POST", path, {"content-type": "application/json"}, json.dumps(body).encode(), timeout=timeout
        )
        return json.loads((await transport.send(request)).body)

    try:
        session_id = (await send("/api/v1/create_session", {}))["session_id"]
        lora = {"rank": 2}
        await send(
            "/api/v1/create_model",
            {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora},
        )
        # Operation 2 waits for operation 1, which never comes.
        step = {"model_id": f"{session_id}:train:0", "seq_id": 2, "adam_params": {}}
        accepted = await send("/api/v1/optim_step", step)
        with pytest.raises(APITimeoutError, match=r"0\.1 s"):
            await send("/api/v1/retrieve_future", {"request_id": accepted["request_id"]}, timeout=0.1)
    finally:
        await transport.close()


async def test_clients_of_one_home_share_an_engine(tmp_path: Path, tiny_model: Path) -> None:
    models = {"tiny": str(tiny_model)}
    first, second = LocalTransport(tmp_path, models), LocalTransport(tmp_path, models)
    health = Request("GET", "/api/v1/healthz")
    await asyncio.gather(first.send(health), second.send(health))
    await first.close()
    assert (await second.send(health)).status == 200
    await second.close()


@pytest.mark.slow
def test_a_missing_extra_comes_with_the_command_that_installs_it() -> None:
    program = """
    import sys

    class Without:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in {"torch", "starlette"}:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Without())
    import tinkex
    try:
        tinkex.ServiceClient(base_url="local").get_server_capabilities()
    except tinkex.SetupError as error:
        print(error)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "TINKEX_HOME": "/nowhere"},
    )
    assert "pip install 'tinkex[engine]'" in out.stdout


@pytest.mark.slow
def test_at_the_end_of_a_program_its_clients_go_before_the_engine(tmp_path: Path, tiny_model: Path) -> None:
    program = """
import tinkex
from tinkex._runtime import background
from tinkex.engine.engine import Engine

close = Engine.close

def tell(engine):
    print("nobody asks any more" if loop.is_closed() else "somebody still asks")
    close(engine)

loop = background().loop
Engine.close = tell
service = tinkex.ServiceClient(base_url="local")
service.get_server_capabilities()
"""
    environment = {**os.environ, "TINKEX_HOME": str(tmp_path), "TINKEX_MODELS": f"tiny={tiny_model}"}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "nobody asks any more\n", "")
