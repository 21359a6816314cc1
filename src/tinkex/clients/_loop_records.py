"""The parts of the training and the REST client that report and read metrics and rollouts of training loops."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from tinkex import types
from tinkex._runtime import background
from tinkex._wire.endpoints import endpoint
from tinkex.clients._docstrings import documented
from tinkex.clients._twins import async_form
from tinkex.clients._warnings import warn_caller
from tinkex.errors import TinkexError, Unsupported
from tinkex.types.coercion import as_float, as_int

if TYPE_CHECKING:
    from tinkex.clients._rest_calls import RestCalls
    from tinkex.clients.session import OpenSession, Session
    from tinkex.futures import AwaitableConcurrentFuture

__all__ = [
    "IfUnsupported",
    "LoopReportMethods",
    "PassRollouts",
    "RolloutNumbers",
    "RunRecordMethods",
    "check_rollouts_are_stored",
]

logger = logging.getLogger("tinkex")

IfUnsupported = Literal["error", "warn"]

MAX_STEP = 2**53
STEPS_REMEMBERED = 16
"""Steps whose rollouts are numbered on if they are reported in several calls."""
MAX_VALUES = 200_000
"""Tokens, logprobs and advantages in one request."""


@documented("client")
class LoopReportMethods:
    """Reports what a training loop measures."""

    model_id: types.ModelID
    _session: Session
    _opened: OpenSession
    _rollout_numbers: RolloutNumbers
    _pass_rollouts: PassRollouts | None

    def log_metrics(
        self, step: int, metrics: Mapping[str, float], *, if_unsupported: IfUnsupported = "error"
    ) -> AwaitableConcurrentFuture[None]:
        """Stores metrics of a step on the server, beside those it records by itself, such as the loss of every optimizer step.

        ::

            training.log_metrics(step, {"reward": 0.5, "eval/accuracy": 0.75})

        ``metrics`` are numbers by name; one that is not finite is shown as a gap. A step that is logged again keeps its other
        metrics. Our extension: other servers do not store metrics, where this raises ``Unsupported``, unless
        ``if_unsupported="warn"``. The call need not be awaited.
        """
        step = _step(step)
        if not isinstance(metrics, Mapping):
            raise TypeError(f"metrics is a mapping such as {{'reward': 0.5}}, got {type(metrics).__name__}")
        values: dict[str, float | None] = {}
        for name, given in metrics.items():
            if not isinstance(name, str) or not name:
                raise ValueError(f"the name of a metric is a text, got {name!r}")
            value = as_float(given, f"metrics[{name!r}]")
            values[name] = value if math.isfinite(value) else None
        if not self._is_stored("metrics", "log_metrics", if_unsupported) or not values:
            return background().submit(_nothing())
        request = types.LogMetricsRequest(model_id=self.model_id, step=step, metrics=values)
        return background().submit(self._report("log_metrics", [request]))

    log_metrics_async = async_form(log_metrics)

    def log_rollouts(
        self,
        step: int,
        rollouts: Sequence[types.Rollout],
        *,
        if_unsupported: IfUnsupported = "error",
    ) -> AwaitableConcurrentFuture[None]:
        """Stores what was sampled in a step of reinforcement learning, with rewards and advantages, to be looked at later.

        ::

            training.log_rollouts(step, [
                types.Rollout(group=str(n), tokens=sequence.tokens, logprobs=sequence.logprobs, reward=1.0, text=text)
                for n, sequence, text in answers
            ])

        Further calls for the same step add to it. The server keeps a limited number of bytes and deletes the oldest steps. With
        the setting ``log_rollouts`` the client reports the data of every pass by itself, until this is called. Our extension,
        as :meth:`log_metrics`.
        """
        step = _step(step)
        for index, each in enumerate(rollouts):
            if not isinstance(each, types.Rollout):
                raise TypeError(
                    f"rollouts[{index}] is a {type(each).__name__}; every item must be a types.Rollout"
                )
        if not self._is_stored("rollouts", "log_rollouts", if_unsupported) or not rollouts:
            return background().submit(_nothing())
        self._pass_rollouts = None
        return background().submit(self._report("log_rollouts", self._rollout_requests(step, rollouts)))

    log_rollouts_async = async_form(log_rollouts)

    def _start_reports(self, *, logs_passes: bool) -> None:
        self._rollout_numbers = RolloutNumbers()
        self._pass_rollouts = PassRollouts() if logs_passes else None

    def _count_step(self) -> None:
        """Notes an optimizer step, for the rollouts of the passes that follow."""
        if self._pass_rollouts is not None:
            self._pass_rollouts.stepped()

    def _log_pass(self, data: Sequence[types.Datum]) -> None:
        """Reports the data of a pass as rollouts, with the setting ``log_rollouts``; training goes on if that fails."""
        if self._pass_rollouts is None:
            return
        step, rollouts = self._pass_rollouts.of(data)
        if rollouts:
            background().submit(self._report_or_warn(self._rollout_requests(step, rollouts)))

    async def _report_or_warn(self, requests: Sequence[types.LogRolloutsRequest]) -> None:
        try:
            await self._report("log_rollouts", requests)
        except TinkexError as error:
            logger.warning("the server did not store rollouts of step %d: %s", requests[0].step, error)

    def _rollout_requests(
        self, step: int, rollouts: Sequence[types.Rollout]
    ) -> Sequence[types.LogRolloutsRequest]:
        first = self._rollout_numbers.take(step, len(rollouts))
        requests = []
        for chunk in _chunks(rollouts):
            requests.append(
                types.LogRolloutsRequest(model_id=self.model_id, step=step, first=first, rollouts=chunk)
            )
            first += len(chunk)
        return requests

    def _is_stored(self, what: str, method: str, if_unsupported: IfUnsupported) -> bool:
        if if_unsupported not in {"error", "warn"}:
            raise ValueError(f"if_unsupported is 'error' or 'warn', got {if_unsupported!r}")
        self._session.check_open()
        if _stores(self._opened, what):
            return True
        message = f"this server does not store {what} of training loops; call {method} on a Tinkex engine"
        if if_unsupported == "error":
            raise Unsupported(f"{message}, or with if_unsupported='warn'")
        warn_caller(f"{message}. Nothing was sent.", UserWarning)
        return False

    async def _report(self, name: str, requests: Sequence[Any]) -> None:
        for request in requests:
            await self._session.caller.call(endpoint(name), request)


@documented("rest")
class RunRecordMethods:
    """Reads metrics and rollouts of runs."""

    _calls: RestCalls

    def get_training_run_metrics(
        self,
        training_run_id: types.ModelID,
        name: str | None = None,
        *,
        start: int = 0,
        stop: int | None = None,
        max_points: int = 1000,
    ) -> AwaitableConcurrentFuture[types.TrainingRunMetrics]:
        """The metrics of a run: those of the server, such as the loss of every optimizer step, and those that its loop logged.

        ::

            metrics = rest.get_training_run_metrics(training.model_id).result()
            print(metrics["loss:sum"].steps, metrics["loss:sum"].values)

        ``name`` is that of one metric; default: all. Our extension, which other servers do not serve.
        """
        query = {"name": name, "start": _step(start), "stop": stop, "max_points": max_points}
        return self._calls.start(self._calls.training_run_metrics(training_run_id, query))

    get_training_run_metrics_async = async_form(get_training_run_metrics)

    def list_rollouts(
        self, training_run_id: types.ModelID, step: int | None = None, *, limit: int = 64, offset: int = 0
    ) -> AwaitableConcurrentFuture[types.RolloutsResponse]:
        """A page of the rollouts that the loop of a run reported for a step; default: the last step that has any.

        ::

            for logged in rest.list_rollouts(training.model_id, step=20).result().rollouts:
                print(logged.rollout.reward, logged.rollout.text)

        Our extension, which other servers do not serve.
        """
        query = {"step": step, "limit": limit, "offset": offset}
        return self._calls.start(self._calls.rollouts(training_run_id, query))

    list_rollouts_async = async_form(list_rollouts)


class PassRollouts:
    """Turns the data of losses of reinforcement learning into rollouts of the optimizer step that they belong to.

    Such a datum has ``logprobs`` and ``advantages``. Its answer starts where one of them is not zero. Answers to the same
    prompt are a group. Rewards are not part of the data.

    >>> inputs = {"target_tokens": [2, 3, 4], "logprobs": [0.0, -0.5, -1.0], "advantages": [0.0, 2.0, 2.0]}
    >>> step, (rollout,) = PassRollouts().of([types.Datum(types.ModelInput.from_ints([1, 2, 3]), inputs)])
    >>> step, rollout.group, rollout.prompt_tokens, rollout.tokens, rollout.advantage
    (1, 'prompt 1', [1, 2], [3, 4], 2.0)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step = 1
        self._groups: dict[tuple[int, ...], str] = {}

    def stepped(self) -> None:
        """Counts an optimizer step: the passes that follow belong to the next one."""
        with self._lock:
            self._step += 1
            self._groups.clear()

    def of(self, data: Sequence[types.Datum]) -> tuple[int, Sequence[types.Rollout]]:
        """Returns the step and the rollouts of a pass."""
        with self._lock:
            return self._step, [each for each in map(self._rollout, data) if each is not None]

    def _rollout(self, datum: types.Datum) -> types.Rollout | None:
        inputs = [datum.loss_fn_inputs.get(name) for name in ("target_tokens", "logprobs", "advantages")]
        arrays = [one.to_numpy() for one in inputs if one is not None]
        if len(arrays) < len(inputs) or any(one.ndim != 1 or one.size != arrays[0].size for one in arrays):
            return None  # data of another loss, or the server says what is wrong with it
        targets, logprobs, advantages = (one.tolist() for one in arrays)
        places = range(len(targets))
        start = next((place for place in places if logprobs[place] or advantages[place]), len(targets))
        if start == len(targets):
            return None
        prompt = tuple(_tokens(datum.model_input)[: start + 1])
        weighted = [one for one in advantages if one]
        return types.Rollout(
            group=self._groups.setdefault(prompt, f"prompt {len(self._groups) + 1}"),
            prompt_tokens=list(prompt),
            tokens=targets[start:],
            logprobs=logprobs[start:],
            advantages=advantages[start:],
            advantage=sum(weighted) / len(weighted) if weighted else 0.0,
        )


class RolloutNumbers:
    """Numbers the rollouts of each step, so that a request that is repeated stores each of them once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: dict[int, int] = {}

    def take(self, step: int, count: int) -> int:
        """Takes the next numbers of a step; returns the first."""
        with self._lock:
            first = self._next.pop(step, 0)
            self._next[step] = first + count
            while len(self._next) > STEPS_REMEMBERED:
                del self._next[next(iter(self._next))]
            return first


def check_rollouts_are_stored(opened: OpenSession) -> None:
    """Raises ``Unsupported`` for the setting ``log_rollouts`` and a server that stores no rollouts."""
    if not _stores(opened, "rollouts"):
        raise Unsupported(
            "this server does not store rollouts of training loops; remove log_rollouts (TINKEX_LOG_ROLLOUTS), or use a Tinkex engine"
        )


def _stores(opened: OpenSession, what: str) -> bool:
    return what in (opened.client_config.training_extensions or ())


def _tokens(model_input: types.ModelInput) -> Sequence[int]:
    """The tokens of an input; empty if it has other chunks than text."""
    chunks = model_input.chunks
    if not all(isinstance(chunk, types.EncodedTextChunk) for chunk in chunks):
        return []
    return model_input.to_ints()


def _step(given: Any) -> int:
    step = as_int(given, "step")
    if not 0 <= step <= MAX_STEP:
        raise ValueError(f"step is an integer from 0 to 2^53, got {given!r}")
    return step


def _chunks(rollouts: Sequence[types.Rollout]) -> Iterator[list[types.Rollout]]:
    chunk: list[types.Rollout] = []
    num_values = 0
    for each in rollouts:
        size = (
            3 * len(each.tokens)
            + len(each.prompt_tokens or ())
            + len(each.text or "")
            + len(each.prompt or "")
        )
        if chunk and num_values + size > MAX_VALUES:
            yield chunk
            chunk, num_values = [], 0
        chunk.append(each)
        num_values += size
    if chunk:
        yield chunk


async def _nothing() -> None:
    return None
