"""A scripted server with runs and checkpoints, and a client of it that does not try again by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.scripted import ScriptedServer
from tinkex import Config, ServiceClient, types
from tinkex.observability.events import Event
from tinkex.testing import Reply, Request, reply


class Events:
    """Records events."""

    def __init__(self) -> None:
        self.seen: list[Event] = []

    def emit(self, event: Event) -> None:
        self.seen.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.seen if isinstance(event, kind)]


class Runs(ScriptedServer):
    """Knows runs ``old`` and their checkpoints; tests say how they are."""

    def __init__(self) -> None:
        super().__init__()
        self.corrupted: set[str] = set()
        self.gone: set[str] = set()
        self.down = False
        self.checkpoints: dict[str, list[types.Checkpoint]] = {}
        self.answers["load_weights"] = self.load
        self.unloadable: set[str] = set()

    def handle(self, request: Request) -> Any:
        if self.down and "heartbeat" not in request.path:
            return reply({"detail": "away"}, status=503)
        return super().handle(request)

    def save(self, run: str, name: str, **metadata: str) -> str:
        saved = self.checkpoints.setdefault(run, [])
        path = f"tinker://{run}/weights/{name}"
        saved.append(
            types.Checkpoint(
                checkpoint_id=f"weights/{name}",
                checkpoint_type="training",
                time=datetime(2026, 8, 1, tzinfo=UTC) + timedelta(minutes=len(saved)),
                tinker_path=path,
                user_metadata=dict(metadata),
            )
        )
        return path

    def on_get_training_run(self, value: Any, request: Request) -> Reply:
        run = request.path.rpartition("/")[2]
        if run in self.gone:
            return reply({"detail": f"no run {run}"}, status=404)
        saved = self.checkpoints.get(run, [])
        return reply(
            {
                "training_run_id": run,
                "base_model": "toy",
                "model_owner": "me",
                "is_lora": True,
                "last_request_time": datetime.now(UTC).isoformat(),
                "corrupted": run in self.corrupted,
                "last_checkpoint": saved[-1].model_dump(mode="json") if saved else None,
                "user_metadata": {"purpose": "test"},
            }
        )

    def on_list_checkpoints(self, value: Any, request: Request) -> Reply:
        run = request.path.split("/")[-2]
        if run in self.gone:
            return reply({"detail": f"no run {run}"}, status=404)
        return reply({"checkpoints": [one.model_dump(mode="json") for one in self.checkpoints.get(run, [])]})

    def load(self, value: types.LoadWeightsRequest, request: Request) -> Reply:
        if value.path in self.unloadable:
            return reply({"detail": f"{value.path} is damaged"}, status=410)
        return self.on_load_weights(value, request)


@pytest.fixture
def server() -> Runs:
    return Runs()


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def service(server: Runs) -> Iterator[ServiceClient]:
    with ServiceClient(transport=server.transport, config=Config(max_retries=0)) as client:
        yield client


@pytest.fixture
def calm() -> Callable[[], float]:
    """Dice without jitter."""
    return lambda: 0.0
