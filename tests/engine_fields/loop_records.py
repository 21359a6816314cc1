"""Proofs for metrics and rollouts of training loops."""

from __future__ import annotations

from typing import Any

from tests.engine_fields.rig import Rig, assert_rejected
from tests.engine_fields.table import proves

ROLLOUT: dict[str, Any] = {
    "tokens": [5, 6],
    "logprobs": [-0.5, -0.25],
    "advantages": [1.0, -1.0],
    "reward": 0.5,
    "advantage": 0.25,
    "group": "17",
    "prompt_tokens": [1, 2, 3],
    "prompt": "four?",
    "text": " 4",
    "metrics": {"format": 1.0},
}


def logged(rig: Rig, run_id: str, step: int) -> list[dict[str, Any]]:
    """The rollouts of a step, with their numbers."""
    found = rig.ada.get(f"training_runs/{run_id}/rollouts?step={step}")
    assert found.status == 200, found.body
    rollouts: list[dict[str, Any]] = found.json["rollouts"]
    return rollouts


@proves("LogMetricsRequest.model_id", "LogMetricsRequest.step", "LogMetricsRequest.metrics")
def metrics_of_a_step(rig: Rig) -> None:
    run_id = rig.run().run_id
    body = {"model_id": run_id, "step": 7, "metrics": {"reward": 0.5}}
    assert rig.ada.post("log_metrics", body).status == 200
    [series] = rig.ada.get(f"training_runs/{run_id}/metrics?name=reward").json["series"]
    assert (series["name"], series["source"], series["steps"], series["values"]) == (
        "reward",
        "logged",
        [7],
        [0.5],
    )
    assert_rejected(rig.ada.post("log_metrics", {**body, "model_id": "nowhere"}), "nowhere", 404)
    assert_rejected(rig.ada.post("log_metrics", {**body, "step": -1}), "step")
    assert_rejected(rig.ada.post("log_metrics", {**body, "metrics": {"reward": "high"}}), "metrics")


@proves(
    "LogRolloutsRequest.model_id",
    "LogRolloutsRequest.step",
    "LogRolloutsRequest.first",
    "LogRolloutsRequest.rollouts",
)
def rollouts_of_a_step(rig: Rig) -> None:
    run_id = rig.run().run_id
    body = {"model_id": run_id, "step": 3, "first": 0, "rollouts": [{"text": "one"}]}
    assert rig.ada.post("log_rollouts", body).status == 200
    assert rig.ada.post("log_rollouts", body).status == 200
    assert rig.ada.post("log_rollouts", {**body, "first": 1, "rollouts": [{"text": "two"}]}).status == 200
    assert [each["rollout"]["text"] for each in logged(rig, run_id, 3)] == ["one", "two"]
    assert not logged(rig, run_id, 4)
    assert_rejected(rig.ada.post("log_rollouts", {**body, "model_id": "nowhere"}), "nowhere", 404)


@proves(*(f"Rollout.{name}" for name in ROLLOUT))
def every_part_of_a_rollout(rig: Rig) -> None:
    run_id = rig.run().run_id
    body = {"model_id": run_id, "step": 1, "rollouts": [ROLLOUT]}
    assert rig.ada.post("log_rollouts", body).status == 200
    [found] = logged(rig, run_id, 1)
    assert {name: found["rollout"][name] for name in ROLLOUT} == ROLLOUT
