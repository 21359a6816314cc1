"""Compatible routes are metered like native samples: quotas, metrics, and nothing left behind by a rejected request."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.traces import traced
from tests.unit.engine.api.asgi import Client
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.engine.store import UsageKind


@pytest.mark.slow
def test_a_batch_is_accepted_as_a_whole_or_not_at_all(tiny_model: Path, tmp_path: Path) -> None:
    config = EngineConfig(home=tmp_path, models={"tiny": str(tiny_model)}, max_pending_operations=3)
    engine = Engine(config)
    engine.start()
    try:
        engine.load_models().result()
        client = Client(build_app(engine), engine.api_key)

        def complete(**fields: Any) -> Any:
            body = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 4, **fields}
            return client.call("POST", "/v1/completions", body)

        assert complete().status == 200
        refused = complete(prompt=["a"] * 8)
        assert refused.status == 429
        assert refused.json["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        # Those of the batch that were accepted before it was refused are cancelled on the engine's thread.
        deadline = time.monotonic() + 60
        while sum(engine.stats().operations.values()):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert complete(stream=True).status == 200
        messages = [{"role": "user", "content": "a"}]
        chat = {"model": "tiny", "messages": messages, "max_tokens": 4}
        used = client.call("POST", "/v1/chat/completions", chat).json["usage"]
        assert used["completion_tokens"] <= 4
        metrics = client.call("GET", "/metrics").body.decode()
        assert "openai_completions" in metrics
        assert sum(engine.stats().operations.values()) == 0
        assert engine.stats().used[UsageKind.SAMPLE] >= used["completion_tokens"]
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/completions", "/anthropic/api/v1/messages"])
def test_a_sample_belongs_to_the_trace_of_its_call(tiny_model: Path, tmp_path: Path, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": "a"}
    if "messages" in path:
        prompt = {"messages": [{"role": "user", "content": "a"}]}
    with traced() as traces:
        engine = Engine(EngineConfig(home=tmp_path, models={"tiny": str(tiny_model)}))
        engine.start()
        try:
            client = Client(build_app(engine), engine.api_key)
            header = {"traceparent": f"00-{7:032x}-{9:016x}-01"}
            assert (
                client.call("POST", path, {"model": "tiny", "max_tokens": 2, **prompt}, header).status == 200
            )
        finally:
            engine.close()
    call, queue = traces.one(f"POST {path}"), traces.one("tinkex.queue")
    assert call.context.trace_id == queue.context.trace_id == 7
