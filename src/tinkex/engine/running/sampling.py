"""The decode batches: which samples run, step by step, and what becomes of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import msgspec

from tinkex.engine.encoding import failed, read_request, succeeded
from tinkex.engine.integrity import CheckpointIntegrity
from tinkex.engine.lanes.interface import AddRequest, BatchStats, DecodeReport, DecodeStep
from tinkex.engine.lanes.lane import Lane
from tinkex.engine.lookup import resolve_sampler, sequence_ids
from tinkex.engine.operation import Operation
from tinkex.engine.running.crashes import CrashTracker
from tinkex.engine.running.feeds import TokenFeeds
from tinkex.engine.running.table import OperationTable
from tinkex.engine.sampler.batch_places import EXTRA_PLACES, admits
from tinkex.engine.sampler.job import max_new_tokens
from tinkex.engine.scheduler import FairShare, SampleRouter
from tinkex.engine.served_models import ServedModel, ServedModels, context_length
from tinkex.engine.store import Outcome, Store, UsageKind
from tinkex.errors import EngineFailure, InvalidInput, TinkexError
from tinkex.types import SampleRequest, SampleResponse

logger = logging.getLogger("tinkex.engine")


MAX_JOB_S = 0.05
"""How long a decode job takes steps at most before it reports."""


@dataclass(frozen=True)
class DecodeJob:
    """Decode steps of one base model: the first as planned, then more while nothing else can happen."""

    model: ServedModel
    step: DecodeStep
    is_alone: bool
    """Whether nothing else waits, so that further steps need no plan."""

    def run(self, lane: Lane) -> DecodeReport:
        """Decode until there is something to report, or something waits for the lane."""
        self.model.load_on(lane.backend)
        until = time.monotonic() + MAX_JOB_S if self.is_alone else 0.0
        report = lane.backend.sample(self.model.source, self.step)
        while not (report.ended or report.deltas or lane.is_wanted or time.monotonic() >= until):
            report = lane.backend.sample(self.model.source, DecodeStep())
        return report


class DecodeBatches:
    """Keeps a lane's decode batches full, one per base model, in fair turns, and collects what finishes.

    Only called on the engine thread. ``router`` and ``feeds`` are those of all lanes.
    """

    def __init__(
        self,
        lane: str,
        store: Store,
        models: ServedModels,
        integrity: CheckpointIntegrity,
        table: OperationTable,
        crashes: CrashTracker,
        router: SampleRouter,
        feeds: TokenFeeds,
        max_batch: int,
    ) -> None:
        self._lane = lane
        self._store = store
        self._models = models
        self._integrity = integrity
        self._table = table
        self._crashes = crashes
        self._router = router
        self._feeds = feeds
        self._max_batch = max_batch
        self._shares = FairShare[str]()
        self.is_closed = False
        """Whether no more samples join."""
        self.stats: Mapping[str, BatchStats] = {}
        """The batch of each base model; replaced, never changed, so any thread may read it."""

    def next_job(self, *, is_alone: bool) -> tuple[DecodeJob | None, Sequence[Operation]]:
        """The next job of the model whose turn it is, and the samples that were rejected instead of joining it."""
        sources = self._table.queued_samples(self._lane)
        self._shares.waiting(sources)
        source = self._shares.pick(sources)
        self._shares.charge(source, 1.0)
        rejected: list[Operation] = []
        added = list(self._join(source, rejected))
        running = self._table.running_samples(self._lane, source)
        if not running:
            return None, rejected
        new = {each.request_id for each in added}
        cancelled = [each.request_id for each in running if each.cancelled and each.request_id not in new]
        streamed = self._feeds.take_new([each.request_id for each in running])
        step = DecodeStep(added, cancelled, streamed)
        is_alone = is_alone and self._table.queued_samples(self._lane) == {source: 0}
        return DecodeJob(self._models.by_source(source), step, is_alone), rejected

    def complete(self, job: DecodeJob, report: DecodeReport) -> Sequence[Operation]:
        """Take the result of a job; returns the samples that ended."""
        source = job.model.source
        running = {each.request_id: each for each in self._table.running_samples(self._lane, source)}
        for delta in report.deltas:
            self._feeds.append(delta)
        self.stats = {**self.stats, source: report.batch}
        ended = [running[request_id] for request_id in job.step.cancel]
        for operation in ended:
            operation.outcome = cancelled()
        for request_id, response in report.ended:
            operation = running[request_id]
            if isinstance(response, TinkexError):
                operation.outcome = failed(response)
            else:
                operation.outcome, operation.usage = succeeded(response), _usage(operation, response)
            ended.append(operation)
        return self._end(ended)

    def fail(self, job: DecodeJob, error: Exception) -> Sequence[Operation]:
        """Take the failure of a job: every sample of the batch fails with it, and the batch is empty."""
        source = job.model.source
        if not isinstance(error, TinkexError):
            logger.error("a decode step failed unexpectedly", exc_info=error)
            error = EngineFailure(f"sampling failed: {type(error).__name__}: {error}")
        stats = replace(self.stats.get(source, BatchStats()), num_sequences=0)
        self.stats = {**self.stats, source: stats}
        return self._end(self._table.running_samples(self._lane, source), failed(error))

    def reset(self) -> Sequence[Operation]:
        """Forget the batches: the lane that held them was lost. Returns their samples, to be decoded again from the beginning."""
        self.stats = {}
        running = self._table.running_samples(self._lane)
        self._feeds.restart([each.request_id for each in running])
        self._router.end(running)
        self._router.forget(self._lane)
        return running

    def _end(self, operations: Sequence[Operation], outcome: Outcome | None = None) -> Sequence[Operation]:
        self._router.end(operations)
        return self._table.compute(operations, outcome)

    def _join(self, source: str, rejected: list[Operation]) -> Iterator[AddRequest]:
        """Start the samples that join the batch with this step: those that were interrupted, then those that wait.

        A full batch still accepts samples of users who have none in it.
        """
        num_taken = self.stats.get(source, BatchStats()).num_sequences
        while not self.is_closed:
            running = self._table.running_samples(self._lane, source)
            retried = self._table.peek_retried_sample(source)
            if any(self._crashes.runs_alone(each.request_id) for each in running):
                return
            if retried is not None and running and self._crashes.runs_alone(retried.request_id):
                return
            users = {each.owner for each in running}
            if num_taken >= self._max_batch and (
                retried is not None or self._router.has_choice or len(users) > EXTRA_PLACES
            ):
                return

            def may_join(
                waiting: Operation, users: AbstractSet[str] = users, num_taken: int = num_taken
            ) -> bool:
                return admits(num_taken, users, waiting.owner, self._max_batch)

            operation = start_sample(
                self._table,
                self._router,
                self._lane,
                source,
                self._max_batch,
                is_idle=not running,
                may_join=may_join,
            )
            if operation is None:
                return
            try:
                request = self._add_request(operation)
            except TinkexError as error:
                rejected += self._end([operation], failed(error))
                continue
            num_taken += len(request.sequence_ids)
            yield request

    def _add_request(self, operation: Operation) -> AddRequest:
        request = operation.request = read_request(self._store, operation)
        assert isinstance(request, SampleRequest)
        sampler = resolve_sampler(self._store, self._models, self._integrity, operation.owner, request)
        if operation.attempt == 1:
            operation.directory = sampler.directory
        return AddRequest(
            request_id=operation.request_id,
            request=_with_context(
                _with_seed(request, operation.request_id), context_length(sampler.base_model)
            ),
            sequence_ids=sequence_ids(operation.request_id, request.num_samples),
            owner=operation.owner,
            directory=operation.directory,
            stream=self._feeds.join(operation.request_id),
        )


def start_sample(
    table: OperationTable,
    router: SampleRouter,
    lane: str,
    source: str,
    max_batch: int,
    *,
    is_idle: bool,
    may_join: Callable[[Operation], bool] | None = None,
) -> Operation | None:
    """Start the sample that joins a lane's batch next, or None.

    With one sampler it is one that ``may_join``. With several samplers it is one that is assigned to the lane, or for an
    ``is_idle`` lane one that others cannot take soon.
    """
    if not router.has_choice:
        return table.start_sample(lane, source, may_join)
    operation = table.start_assigned_sample(lane, source, router.assign)
    if operation is None and is_idle and router.may_take_any(max_batch):
        operation = table.start_sample(lane, source, lambda waiting: router.may_take(waiting, max_batch))
    if operation is not None:
        router.move(operation, lane)
    return operation


def _with_context(request: SampleRequest, max_context: int | None) -> SampleRequest:
    """The request with as many new tokens as the context in the model's name has room for."""
    if max_context is None:
        return request
    params = request.sampling_params
    max_tokens = max_new_tokens(request.prompt.length, params.max_tokens, max_context)
    return msgspec.structs.replace(
        request, sampling_params=msgspec.structs.replace(params, max_tokens=max_tokens)
    )


def _usage(operation: Operation, response: SampleResponse) -> Mapping[UsageKind, int]:
    assert isinstance(operation.request, SampleRequest)
    cached = response.prompt_cache_hit_tokens
    return {
        UsageKind.PREFILL_CACHED: cached,
        UsageKind.PREFILL: max(operation.request.prompt.length - cached, 0),
        UsageKind.SAMPLE: sum(len(sequence.tokens_np) for sequence in response.sequences),
    }


def _with_seed(request: SampleRequest, request_id: str) -> SampleRequest:
    """The request with a seed: one without gets its own, so that its tokens are the same when it is decoded again."""
    if request.sampling_params.seed is not None:
        return request
    seed = int.from_bytes(request_id.encode())
    return msgspec.structs.replace(
        request, sampling_params=msgspec.structs.replace(request.sampling_params, seed=seed)
    )


def cancelled() -> Outcome:
    """The outcome of a cancelled sample."""
    return failed(InvalidInput("the request was cancelled by the client."))
