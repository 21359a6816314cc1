"""Samples on their way through the decode batches. Everything here happens on the engine thread."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinkex.engine.operations.admission import Admission
from tinkex.engine.operations.backlog import Backlog, Operation
from tinkex.engine.operations.feeds import Feed
from tinkex.engine.operations.metering import Metering
from tinkex.engine.operations.outcomes import failed, succeeded
from tinkex.engine.operations.promises import sequence_ids
from tinkex.engine.operations.served import Base, ServedModels
from tinkex.engine.operations.snapshots import Snapshots
from tinkex.engine.scheduler import FairShare, Work
from tinkex.engine.store import Outcome
from tinkex.errors import EngineFailure, InvalidInput, ModelUnavailable, SetupError, TinkexError
from tinkex.types import SampleRequest

logger = logging.getLogger("tinkex.engine")


@dataclass(frozen=True)
class Batch:
    """What the samples of one base model hold."""

    num_sequences: int
    kv_bytes: int
    num_preemptions: int


class Decoding:
    """Keeps each base model's decode batch full, in fair turns, and collects what finishes."""

    def __init__(
        self,
        models: ServedModels,
        backlog: Backlog,
        admission: Admission,
        snapshots: Snapshots,
        max_batch: int,
        metering: Metering,
    ) -> None:
        self._models = models
        self._backlog = backlog
        self._admission = admission
        self._snapshots = snapshots
        self._max_batch = max_batch
        self._metering = metering
        self._in_batch: dict[str, dict[str, Work[Operation]]] = {}
        self._watched: dict[str, Feed] = {}
        self._turns = FairShare[str]()
        self.batches: Mapping[str, Batch] = {}
        """What each base model's samples hold; never changed, only replaced, so any thread may read it."""

    def wanted(self) -> bool:
        """Whether any sample waits or runs."""
        return bool(self._sources())

    def step(self) -> Sequence[tuple[str, Outcome]]:
        """One step of the base model whose turn it is; returns what ended."""
        sources = self._sources()
        self._turns.waiting(sources)
        source = self._turns.pick(sources)
        self._turns.charge(source, 1.0)
        base = self._models.by_source(source)
        try:
            base.load()
        except SetupError as error:
            return self._fail_waiting(
                source, ModelUnavailable(f"the model {source} cannot be loaded: {error}")
            )
        outcomes = [*self._fill(base)]
        if base.sampler.busy:
            outcomes += self._advance(base)
        for request_id, _ in outcomes:
            self._in_batch.get(source, {}).pop(request_id, None)
        self._note(base)
        return outcomes

    def watch(self, request_id: str, feed: Feed) -> None:
        """Report the tokens of a sample to a feed, from now on or from when it joins a batch."""
        for source, members in self._in_batch.items():
            if request_id in members:
                self._models.by_source(source).sampler.watch(request_id, feed.grew)
                return
        self._watched[request_id] = feed

    def unwatch(self, request_id: str) -> None:
        """Forget the feed of a sample that never joined a batch."""
        self._watched.pop(request_id, None)

    def drop_cancelled(self) -> Sequence[tuple[str, Outcome]]:
        """Take samples nobody wants any more out of the batches."""
        outcomes: list[tuple[str, Outcome]] = []
        for request_id in self._backlog.take_cancelled():
            for source, members in self._in_batch.items():
                if request_id in members:
                    del members[request_id]
                    self._models.by_source(source).sampler.cancel(request_id)
                    self._note(self._models.by_source(source))
                    outcomes.append((request_id, cancelled()))
        return outcomes

    def _note(self, base: Base) -> None:
        sampler = base.sampler
        batch = Batch(sampler.num_sequences, sampler.kv_bytes, sampler.num_preemptions)
        self.batches = {**self.batches, base.source: batch}

    def _sources(self) -> dict[str, None]:
        running = [source for source, members in self._in_batch.items() if members]
        return dict.fromkeys([*running, *self._backlog.groups_with_samples()])

    def _fill(self, base: Base) -> Sequence[tuple[str, Outcome]]:
        refused: list[tuple[str, Outcome]] = []
        while base.sampler.num_sequences < self._max_batch:
            work = self._backlog.take_sample(base.source)
            if work is None:
                break
            try:
                self._join(base, work)
            except TinkexError as error:
                refused.append((work.request_id, failed(error)))
        return refused

    def _join(self, base: Base, work: Work[Operation]) -> None:
        """Put a sample into the batch, with the weights it asks for."""
        from tinkex.engine.sampler.job import SampleJob

        request = work.request
        assert isinstance(request, SampleRequest)
        sampler = self._admission.sampler_of(work.tenant, request)
        adapter = None
        if sampler.directory is not None:
            adapter = self._snapshots.get(sampler.directory, base.model.transformer.arch)
        ids = sequence_ids(work.request_id, request.num_samples)
        base.sampler.add(
            SampleJob.of(
                request, request_id=work.request_id, adapter=adapter, sequence_ids=ids, owner=work.tenant
            )
        )
        self._in_batch.setdefault(base.source, {})[work.request_id] = work
        feed = self._watched.pop(work.request_id, None)
        if feed is not None:
            base.sampler.watch(work.request_id, feed.grew)

    def _advance(self, base: Base) -> Sequence[tuple[str, Outcome]]:
        try:
            finished = base.sampler.step()
        except Exception as error:
            # The state of the batch is unknown now: everyone in it fails, and the next samples start afresh.
            logger.exception("a decode step failed in a way it should not")
            members = self._in_batch.pop(base.source, {})
            for request_id in members:
                base.sampler.cancel(request_id)
            failure = failed(EngineFailure(f"sampling failed: {type(error).__name__}: {error}"))
            return [(request_id, failure) for request_id in members]
        outcomes: list[tuple[str, Outcome]] = []
        for request_id, response in finished:
            if isinstance(response, TinkexError):
                outcomes.append((request_id, failed(response)))
            else:
                self._metering.sampled(self._in_batch[base.source][request_id], response)
                outcomes.append((request_id, succeeded(response)))
        return outcomes

    def _fail_waiting(self, source: str, error: TinkexError) -> Sequence[tuple[str, Outcome]]:
        outcomes: list[tuple[str, Outcome]] = []
        while (work := self._backlog.take_sample(source)) is not None:
            outcomes.append((work.request_id, failed(error)))
        return outcomes


def cancelled() -> Outcome:
    """The outcome of a sample its caller gave up."""
    return failed(InvalidInput("the request was cancelled by the client."))
