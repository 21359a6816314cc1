"""Whatever goes wrong and whenever: in the history of the final weights every batch stands once, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tinkex
from tests.unit.recovery.conftest import Runs
from tinkex import Config, ServiceClient, errors, types
from tinkex.observability.events import NullSink
from tinkex.recovery import RecoveryPolicy
from tinkex.testing import Reply, Request, reply

pytestmark = pytest.mark.slow

TROUBLES = ("rejected", "answer lost", "failed", "away")


class Ledger(Runs):
    """A server whose weights are the list of batches they have seen, with trouble at given calls."""

    def __init__(self, troubles: Mapping[int, str]) -> None:
        super().__init__()
        self.troubles = troubles
        self.operations = 0
        self.weights: dict[str, list[int]] = {}
        self.gradient: dict[str, list[int]] = {}
        self.files: dict[str, list[int]] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self.sessions = 0

    def troubled(self, run: str, deed: Any) -> Reply:
        """Carries out an operation, or not, or without the caller hearing of it."""
        self.operations += 1
        match self.troubles.get(self.operations):
            case "rejected":
                self.gone.add(run)
            case "away":
                return reply({"detail": "away"}, status=503)
            case "answer lost":
                deed()
                raise errors.APIConnectionError
            case "failed":
                return self.accept(reply({"error": "the worker died", "category": "server"}))
        if run in self.gone:
            return reply({"detail": f"run {run} is gone"}, status=410)
        return deed()

    def on_create_session(self, value: Any, request: Request) -> Reply:
        self.sessions += 1
        return reply({"session_id": f"sess-{self.sessions}"})

    def on_create_model(self, value: types.CreateModelRequest, request: Request) -> Reply:
        run = f"{value.session_id}:train:{value.model_seq_id}"
        self.metadata[run] = value.user_metadata or {}
        self.weights[run], self.gradient[run] = [], []
        return super().on_create_model(value, request)

    def on_forward_backward(self, value: types.ForwardBackwardRequest, request: Request) -> Reply:
        def deed() -> Reply:
            self.gradient[value.model_id] += [d.model_input.to_ints()[0] for d in value.data]
            return super(Ledger, self).on_forward_backward(value, request)

        return self.troubled(value.model_id, deed)

    def on_optim_step(self, value: types.OptimStepRequest, request: Request) -> Reply:
        def deed() -> Reply:
            self.weights[value.model_id] += self.gradient[value.model_id]
            self.gradient[value.model_id] = []
            return super(Ledger, self).on_optim_step(value, request)

        return self.troubled(value.model_id, deed)

    def on_save_weights(self, value: types.SaveWeightsRequest, request: Request) -> Reply:
        def deed() -> Reply:
            assert value.path is not None
            path = self.save(value.model_id, value.path, **(value.user_metadata or {}))
            self.files[path] = list(self.weights[value.model_id])
            return super(Ledger, self).on_save_weights(value, request)

        return self.troubled(value.model_id, deed)

    def load(self, value: types.LoadWeightsRequest, request: Request) -> Reply:
        def deed() -> Reply:
            assert value.model_id is not None
            self.weights[value.model_id] = list(self.files[value.path])
            return super(Ledger, self).on_load_weights(value, request)

        while self.troubles.get(self.operations + 1) == "rejected":
            self.operations += 1  # of a load it would say that the checkpoint is gone, and it is not
        return self.troubled(value.model_id or "", deed)

    def on_list_checkpoints(self, value: Any, request: Request) -> Reply:
        run = request.path.split("/")[-2]
        return reply({"checkpoints": [one.model_dump(mode="json") for one in self.checkpoints.get(run, [])]})

    def on_list_training_runs(self, value: Any, request: Request) -> Reply:
        runs = list(self.metadata) if int(request.query["offset"]) == 0 else []
        found = [
            {
                "training_run_id": run,
                "base_model": "toy",
                "model_owner": "me",
                "is_lora": True,
                "last_request_time": "2026-08-01T00:00:00Z",
                "user_metadata": self.metadata[run],
            }
            for run in runs
        ]
        cursor = {"offset": 0, "limit": 100, "total_count": len(self.metadata)}
        return reply({"training_runs": found, "cursor": cursor})


def batch(n: int) -> list[types.Datum]:
    return [types.Datum(types.ModelInput.from_ints([n]), {"target_tokens": [n + 1]})]


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    troubles=st.dictionaries(st.integers(1, 40), st.sampled_from(TROUBLES), max_size=6),
    steps=st.integers(1, 9),
    every=st.integers(1, 4),
    waits=st.booleans(),
    once=st.booleans(),
    dies_after=st.none() | st.integers(0, 8),
)
def test_every_batch_stands_once_and_in_order(
    troubles: dict[int, str], steps: int, every: int, waits: bool, once: bool, dies_after: int | None
) -> None:
    server = Ledger(troubles)
    policy = RecoveryPolicy(backoff_s=1e-4, max_backoff_s=1e-4, max_attempts=20)

    def program(dies_after: int | None) -> Any:
        """The program; it may die, without a word, after a step."""
        with ServiceClient(transport=server.transport, config=Config(max_retries=0)) as service:
            data: Any = iter([batch(n) for n in range(steps)]) if once else [batch(n) for n in range(steps)]
            loop = tinkex.resilient_training(
                service,
                data,
                name="ledger",
                base_model="toy",
                checkpoint_every=every,
                policy=policy,
                events=NullSink(),
            )
            for step in loop:
                with step:
                    futures = [
                        step.training.forward_backward(step.batch, "cross_entropy"),
                        step.training.optim_step(types.AdamParams()),
                    ]
                    if waits:
                        for future in futures:
                            future.result(timeout=20)
                if step.index == dies_after:
                    return None
            return loop

    loop = program(dies_after)
    if loop is None:
        loop = program(None)
    assert loop.position == steps
    assert server.files[loop.checkpoint] == list(range(steps))
    assert server.weights[loop.training.model_id] == list(range(steps))
