"""The decode batches: which samples run, step by step, and what becomes of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from tinkex.engine.encoding import failed, succeeded
from tinkex.engine.integrity import CheckpointIntegrity
from tinkex.engine.lanes.interface import AddRequest, BatchStats, DecodeReport, DecodeStep
from tinkex.engine.lanes.lane import Lane
from tinkex.engine.lookup import resolve_sampler, sequence_ids
from tinkex.engine.operation import Operation
from tinkex.engine.running.crashes import CrashTracker
from tinkex.engine.running.feeds import TokenFeed
from tinkex.engine.running.table import OperationTable
from tinkex.engine.scheduler import FairShare
from tinkex.engine.served_models import ServedModel, ServedModels
from tinkex.engine.store import Outcome, Store, UsageKind
from tinkex.errors import EngineFailure, InvalidInput, TinkexError
from tinkex.types import SampleRequest, SampleResponse

logger = logging.getLogger("tinkex.engine")


@dataclass(frozen=True)
class DecodeJob:
    """One decode step of a base model."""

    model: ServedModel
    step: DecodeStep

    def run(self, lane: Lane) -> DecodeReport:
        """Load the model if necessary, and decode."""
        self.model.load_on(lane)
        return lane.backend.sample(self.model.source, self.step)


class DecodeBatches:
    """Keeps each base model's decode batch full, in fair turns, and collects what finishes. Only called on the engine thread."""

    def __init__(
        self,
        store: Store,
        models: ServedModels,
        integrity: CheckpointIntegrity,
        table: OperationTable,
        crashes: CrashTracker,
        max_batch: int,
    ) -> None:
        self._store = store
        self._models = models
        self._integrity = integrity
        self._table = table
        self._crashes = crashes
        self._max_batch = max_batch
        self._feeds: dict[str, TokenFeed] = {}
        self._new_feeds: set[str] = set()
        self._shares = FairShare[str]()
        self.stats: Mapping[str, BatchStats] = {}
        """The batch of each base model; replaced, never changed, so any thread may read it."""

    def next_job(self) -> tuple[DecodeJob | None, Sequence[Operation]]:
        """The next step of the model whose turn it is, and the samples that were rejected instead of joining it."""
        sources = self._table.models_with_samples()
        self._shares.waiting(sources)
        source = self._shares.pick(sources)
        self._shares.charge(source, 1.0)
        rejected: list[Operation] = []
        added = list(self._join(source, rejected))
        running = self._table.running_samples(source)
        if not running:
            return None, rejected
        new = {each.request_id for each in added}
        cancelled = [each.request_id for each in running if each.cancelled and each.request_id not in new]
        streamed = [each.request_id for each in running if each.request_id in self._new_feeds]
        self._new_feeds.difference_update(streamed)
        step = DecodeStep(added, cancelled, streamed)
        return DecodeJob(self._models.by_source(source), step), rejected

    def complete(self, job: DecodeJob, report: DecodeReport) -> Sequence[Operation]:
        """Take the result of a step; returns the samples that ended."""
        source = job.model.source
        running = {each.request_id: each for each in self._table.running_samples(source)}
        ended = [self._table.compute(running.pop(each), cancelled()) for each in job.step.cancel]
        for delta in report.deltas:
            feed = self._feeds.get(delta.request_id)
            if feed is not None:
                feed.append(delta)
        for request_id, response in report.ended:
            operation = running[request_id]
            if isinstance(response, TinkexError):
                self._table.compute(operation, failed(response))
            else:
                self._table.compute(operation, succeeded(response), usage=_usage(operation, response))
            ended.append(operation)
        self.stats = {**self.stats, source: report.batch}
        return ended

    def fail(self, job: DecodeJob, error: Exception) -> Sequence[Operation]:
        """Take the failure of a step: every sample of the batch fails with it, and the batch is empty."""
        source = job.model.source
        if isinstance(error, TinkexError):
            failure = failed(error)
        else:
            logger.error("a decode step failed unexpectedly", exc_info=error)
            failure = failed(EngineFailure(f"sampling failed: {type(error).__name__}: {error}"))
        stats = replace(self.stats.get(source, BatchStats()), num_sequences=0)
        self.stats = {**self.stats, source: stats}
        return [self._table.compute(each, failure) for each in self._table.running_samples(source)]

    def reset(self) -> None:
        """Forget the batches: the lane that held them was lost. Samples are decoded again from their beginning."""
        self.stats = {}
        self._new_feeds.clear()
        for feed in self._feeds.values():
            feed.restart()

    def watch(self, request_id: str, feed: TokenFeed) -> None:
        """Append the tokens of a sample to a feed, from now on or from when it joins a batch."""
        self._feeds[request_id] = feed
        self._new_feeds.add(request_id)

    def unwatch(self, request_id: str) -> None:
        """Remove the feed of a sample."""
        self._feeds.pop(request_id, None)
        self._new_feeds.discard(request_id)

    def _join(self, source: str, rejected: list[Operation]) -> Iterator[AddRequest]:
        """Start the samples that join the batch with this step: those that were interrupted, then those that wait."""
        room = self._max_batch - self.stats.get(source, BatchStats()).num_sequences
        while room > 0:
            running = self._table.running_samples(source)
            retried = self._table.peek_retried_sample(source)
            if any(self._crashes.runs_alone(each.request_id) for each in running):
                return
            if retried is not None and running and self._crashes.runs_alone(retried.request_id):
                return
            operation = self._table.start_sample(source)
            if operation is None:
                return
            try:
                request = self._add_request(operation)
            except TinkexError as error:
                rejected.append(self._table.compute(operation, failed(error)))
                continue
            room -= len(request.sequence_ids)
            yield request

    def _add_request(self, operation: Operation) -> AddRequest:
        request = operation.request
        assert isinstance(request, SampleRequest)
        sampler = resolve_sampler(self._store, self._models, self._integrity, operation.owner, request)
        self._new_feeds.discard(operation.request_id)
        return AddRequest(
            request_id=operation.request_id,
            request=_with_seed(request, operation.request_id),
            sequence_ids=sequence_ids(operation.request_id, request.num_samples),
            owner=operation.owner,
            directory=sampler.directory,
            stream=operation.request_id in self._feeds,
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
