from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.engine.api.asgi import Answer, Client
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.engine.lanes.in_process import LocalBackend
from tinkex.engine.lanes.interface import ModelInfo

LINE = re.compile(r'(?P<name>[a-z_]+)(\{([a-z_]+="(\\.|[^"\\])*",?)+\})? (?P<value>[-+.e\d]+|\+Inf)')


def read(answer: Answer) -> dict[str, float]:
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[str, float] = {}
    for line in answer.body.decode().splitlines():
        if not line.startswith("# "):
            assert LINE.fullmatch(line), line
            name, _, value = line.rpartition(" ")
            assert name not in found
            found[name] = float(value)
    return found


def test_metrics_follow_the_engines_work(ada: Client, engine: Engine) -> None:
    run = ada.create()
    before = read(ada.call("GET", "/metrics"))
    ada.result(ada.post("save_weights", {"model_id": run, "seq_id": 1, "path": "kept"}))
    ada.post("optim_step", {"model_id": run, "seq_id": 3, "adam_params": {}})
    after = read(ada.call("GET", "/metrics"))

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("tinkex_checkpoints_saved_total") == 1
    assert grown('tinkex_operations{kind="optim_step",state="waiting"}') == 1
    assert grown('tinkex_requests_total{endpoint="save_weights",status="200"}') == 1
    assert grown('tinkex_request_duration_seconds_count{endpoint="optim_step"}') == 1
    assert grown('tinkex_disk_bytes{what="checkpoints"}') > 0
    assert grown('tinkex_disk_bytes{what="results"}') > 0
    assert grown("tinkex_journal_rows") >= 2
    assert after["tinkex_live_runs"] >= 1
    assert 0 < after["tinkex_live_bytes"] <= after["tinkex_live_limit_bytes"]
    assert after["tinkex_evictions_total"] >= 0
    assert after['tinkex_health{state="ready"}'] == 1
    assert any(re.fullmatch('tinkex_sampler_info{compute=".+",model="tiny"}', name) for name in after)
    last = 'tinkex_request_duration_seconds_bucket{endpoint="save_weights",le="+Inf"}'
    assert after[last] == after['tinkex_request_duration_seconds_count{endpoint="save_weights"}']
    engine.health.trouble("disk", "it is full")
    troubled = read(ada.call("GET", "/metrics"))
    engine.health.fine("disk")
    assert troubled['tinkex_health{state="degraded"}'] == 1
    assert troubled['tinkex_trouble{subject="disk"}'] == 1


def test_only_the_operator_may_read_metrics(ada: Client, bob: Client) -> None:
    assert bob.call("GET", "/metrics").status == 403
    assert Client(ada.app, None).call("GET", "/metrics").status == 401
    bearer = {"authorization": f"Bearer {ada.key}"}
    assert Client(ada.app, None).call("GET", "/metrics", headers=bearer).status == 200


def test_rejected_requests_are_counted(bob: Client, ada: Client, engine: Engine) -> None:
    assert Client(bob.app, "tml-wrong").get("sessions").status == 401
    found = read(Client(bob.app, engine.api_key).call("GET", "/metrics"))
    assert found['tinkex_requests_total{endpoint="list_sessions",status="401"}'] == 1


def test_an_engine_uses_the_configured_number_of_threads(tiny_model: Path, tmp_path: Path) -> None:
    import torch

    found = []

    class Probe(LocalBackend):
        """Records the number of threads on the lane's thread."""

        def load(self, source: str) -> ModelInfo:
            info = super().load(source)
            found.append(torch.get_num_threads())
            return info

    config = EngineConfig(home=tmp_path, models={"tiny": str(tiny_model)}, threads=1)
    engine = Engine(config, backends=[Probe(config)])
    engine.start()
    try:
        assert engine.health.state == "ready"
        engine.load_models().result()
        assert found == [1]
    finally:
        engine.close()


@pytest.mark.parametrize("given", ["", "two words", "x" * 65, "naïve"])
def test_an_invalid_request_id_is_replaced(given: str, ada: Client) -> None:
    answer = ada.call("GET", "/api/v1/sessions", headers={"x-request-id": given})
    assert re.fullmatch(r"[0-9a-f]{16}", answer.headers["x-request-id"])
