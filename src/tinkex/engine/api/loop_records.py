"""What training loops report, and what is known of them: metrics and rollouts of runs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime

from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.api.limits import number_in, page
from tinkex.engine.lookup import find_run
from tinkex.engine.quotas import check_new_bytes
from tinkex.engine.store import MetricKey, MetricSource, RolloutContent, RolloutRow
from tinkex.engine.store.loop_metrics import MAX_NAME_LENGTH, NAME_BYTES, VALUE_BYTES
from tinkex.engine.store.metric_series import MAX_STEP
from tinkex.errors import InvalidInput
from tinkex.types import (
    LoggedRollout,
    LogMetricsRequest,
    LogRolloutsRequest,
    MetricSeries,
    Rollout,
    RolloutsResponse,
    TrainingRunMetrics,
)

MAX_METRICS_PER_STEP = 1000
MAX_ROLLOUTS_PER_STEP = 10_000
MAX_POINTS = 10_000
"""Points of one metric in a reply."""
MAX_POINTS_IN_TOTAL = 200_000
MAX_STEPS_LISTED = 100_000


async def log_metrics(call: Call) -> Reply:
    """Store what a loop logs for a step; idempotent, the last value of a step stays."""
    request: LogMetricsRequest = call.request
    run = find_run(call.engine.store, call.owner, request.model_id)
    _check_step(request.step)
    _check_names("metrics", request.metrics)
    if len(request.metrics) > MAX_METRICS_PER_STEP:
        raise InvalidInput(
            f"metrics has {len(request.metrics)} entries; a step may have {MAX_METRICS_PER_STEP} at most."
        )
    values = {name: math.nan if value is None else value for name, value in request.metrics.items()}
    num_bytes = len(values) * (VALUE_BYTES + NAME_BYTES)
    check_new_bytes(call.engine.config, call.engine.store, call.owner, num_bytes)
    now, metrics = time.time(), call.engine.store.loop_metrics
    await call.run_on_thread(lambda: metrics.log(run.run_id, call.owner, request.step, values, now))
    return None


async def log_rollouts(call: Call) -> Reply:
    """Store rollouts of a step; idempotent. The oldest steps are deleted if the run or the user has too many bytes."""
    request: LogRolloutsRequest = call.request
    config, store = call.engine.config, call.engine.store
    run = find_run(store, call.owner, request.model_id)
    _check_step(request.step)
    last = request.first + len(request.rollouts)
    if request.first < 0 or last > MAX_ROLLOUTS_PER_STEP:
        raise InvalidInput(
            f"the rollouts of a step are numbered from 0 to {MAX_ROLLOUTS_PER_STEP - 1}, and these are {request.first} to {last - 1}."
        )
    for each in request.rollouts:
        _check_names("metrics of a rollout", each.metrics or {})
    check_new_bytes(config, store, call.owner, len(call.body))
    now = time.time()
    rows = [
        RolloutRow(run.run_id, request.step, place, now, each.reward, each.advantage, _content(each))
        for place, each in enumerate(request.rollouts, request.first)
    ]
    await call.run_on_thread(
        lambda: store.rollouts.add(
            rows,
            call.owner,
            max_bytes_per_run=config.max_rollout_bytes_per_run,
            max_bytes_per_user=config.max_rollout_bytes_per_user,
        )
    )
    return None


async def get_training_run_metrics(call: Call) -> Reply:
    """Returns the metrics of a run, or one of them, in a range of steps."""
    run = find_run(call.engine.store, call.owner, call.parameters["training_run_id"])
    metrics, name = call.engine.store.loop_metrics, call.query.get("name")
    start = number_in(call.query, "start", 0, 0, MAX_STEP)
    stop = number_in(call.query, "stop", MAX_STEP, 0, MAX_STEP)
    max_points = number_in(call.query, "max_points", 1000, 8, MAX_POINTS)

    def read() -> TrainingRunMetrics:
        keys = [key for key in metrics.names(run.run_id) if name is None or key.name == name]
        points = max(8, min(max_points, MAX_POINTS_IN_TOTAL // max(len(keys), 1)))
        progress = metrics.progress([run.run_id]).get(run.run_id)
        series = (_series(call, run.run_id, key, start, stop, points) for key in keys)
        return TrainingRunMetrics(
            training_run_id=run.run_id,
            num_steps=progress.step if progress is not None else 0,
            num_tokens=progress.tokens if progress is not None else 0,
            series=[one for one in series if one is not None],
        )

    return await call.run_on_thread(read)


async def list_rollouts(call: Call) -> Reply:
    """Returns a page of the rollouts of a step; of the last one that has any, unless it is given."""
    run = find_run(call.engine.store, call.owner, call.parameters["training_run_id"])
    rollouts = call.engine.store.rollouts
    limit, offset = page(call.query, default_limit=64)
    asked = number_in(call.query, "step", -1, -1, MAX_STEP)

    def read() -> RolloutsResponse:
        steps = [each.step for each in rollouts.steps(run.run_id, limit=MAX_STEPS_LISTED)]
        step = asked if asked >= 0 else max(steps, default=0)
        rows = rollouts.of_step(run.run_id, step, limit=limit, offset=offset)
        return RolloutsResponse(steps=steps, rollouts=[_logged(row) for row in rows])

    return await call.run_on_thread(read)


def _series(
    call: Call, run_id: str, key: MetricKey, start: int, stop: int, max_points: int
) -> MetricSeries | None:
    found = call.engine.store.loop_metrics.series(
        [run_id], key, start=start, stop=stop, max_points=max_points
    ).get(run_id)
    if found is None:
        return None
    points = found.points
    return MetricSeries(
        name=key.name,
        source="automatic" if key.source is MetricSource.AUTOMATIC else "logged",
        num_values=found.num_values,
        steps=[point.step for point in points],
        values=[point.value for point in points],
        times=[point.at for point in points],
        tokens=[point.tokens for point in points],
    )


def _content(rollout: Rollout) -> RolloutContent:
    return RolloutContent(
        group=rollout.group,
        prompt=rollout.prompt,
        text=rollout.text,
        prompt_tokens=tuple(rollout.prompt_tokens or ()),
        tokens=tuple(rollout.tokens),
        logprobs=None if rollout.logprobs is None else tuple(rollout.logprobs),
        advantages=None if rollout.advantages is None else tuple(rollout.advantages),
        metrics=rollout.metrics or {},
    )


def _logged(row: RolloutRow) -> LoggedRollout:
    content = row.content
    return LoggedRollout(
        step=row.step,
        place=row.place,
        time=datetime.fromtimestamp(row.at, UTC),
        rollout=Rollout(
            tokens=list(content.tokens),
            logprobs=None if content.logprobs is None else list(content.logprobs),
            advantages=None if content.advantages is None else list(content.advantages),
            reward=row.reward,
            advantage=row.advantage,
            group=content.group,
            prompt_tokens=list(content.prompt_tokens) or None,
            prompt=content.prompt,
            text=content.text,
            metrics=dict(content.metrics) or None,
        ),
    )


def _check_step(step: int) -> None:
    if not 0 <= step <= MAX_STEP:
        raise InvalidInput(f"step is {step}; it must be 0 to 2^53.")


def _check_names(field: str, names: Mapping[str, object]) -> None:
    for name in names:
        if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
            raise InvalidInput(
                f"{field} has the name {name[:100]!r}; a name is 1 to {MAX_NAME_LENGTH} printable characters."
            )


HANDLERS: Mapping[str, Handler] = {
    "log_metrics": log_metrics,
    "log_rollouts": log_rollouts,
    "get_training_run_metrics": get_training_run_metrics,
    "list_rollouts": list_rollouts,
}
