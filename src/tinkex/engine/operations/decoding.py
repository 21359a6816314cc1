"""Samples on their way through the decode batches. Everything here happens on the engine thread."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from tinkex.engine.backend.seam import Backend, Batch, Growth, Join, SampleStep, WorkerDied
from tinkex.engine.operations.admission import Admission
from tinkex.engine.operations.backlog import Backlog, Operation
from tinkex.engine.operations.feeds import Feed
from tinkex.engine.operations.metering import Metering
from tinkex.engine.operations.outcomes import failed, succeeded
from tinkex.engine.operations.promises import sequence_ids
from tinkex.engine.operations.served import Base, ServedModels
from tinkex.engine.operations.suspects import Suspects, given_up
from tinkex.engine.scheduler import FairShare, Work
from tinkex.engine.store import Outcome
from tinkex.errors import EngineFailure, InvalidInput, ModelUnavailable, SetupError, TinkexError
from tinkex.types import SampleRequest, StopReason

logger = logging.getLogger("tinkex.engine")

Samples = dict[str, Work[Operation]]
Outcomes = Sequence[tuple[str, Outcome]]


@dataclass
class _Members:
    """The samples of one base model, by what is to be done with them."""

    running: Samples = field(default_factory=dict)
    again: Samples = field(default_factory=dict)
    """Were running when the worker died, and go first."""
    leaving: Samples = field(default_factory=dict)
    """Nobody wants them any more; the worker does not know yet."""
    new_feeds: list[str] = field(default_factory=list)
    """Running ones that somebody watches since the last step."""

    def __bool__(self) -> bool:
        return bool(self.running or self.again or self.leaving)


@dataclass
class _Sequence:
    """One sequence of a watched sample, as far as it is known here."""

    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: StopReason | None = None


@dataclass
class _Watched:
    """A sample that somebody watches."""

    feed: Feed
    sequences: dict[int, _Sequence] = field(default_factory=dict)

    def grew(self, growth: Growth) -> None:
        sequence = self.sequences.setdefault(growth.index, _Sequence(growth.index))
        sequence.tokens[growth.start :] = growth.tokens
        sequence.logprobs[growth.start :] = growth.logprobs
        sequence.stop_reason = growth.stop_reason
        self.feed.grew(sequence)


class Decoding:
    """Keeps each base model's decode batch full, in fair turns, and collects what finishes."""

    def __init__(
        self,
        backend: Backend,
        models: ServedModels,
        backlog: Backlog,
        admission: Admission,
        max_batch: int,
        metering: Metering,
        suspects: Suspects,
    ) -> None:
        self._backend = backend
        self._models = models
        self._backlog = backlog
        self._admission = admission
        self._max_batch = max_batch
        self._metering = metering
        self._suspects = suspects
        self._members: dict[str, _Members] = {}
        self._watched: dict[str, _Watched] = {}
        self._turns = FairShare[str]()
        self.batches: Mapping[str, Batch] = {}
        """What each base model's samples hold; never changed, only replaced, so any thread may read it."""

    def wanted(self) -> bool:
        """Whether any sample waits, runs or is to be dropped."""
        return bool(self._sources())

    def step(self) -> Outcomes:
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
        members = self._members.setdefault(source, _Members())
        refused: list[tuple[str, Outcome]] = []
        joining = list(self._joining(base, members, refused))
        outcomes = refused
        if members:
            outcomes = [*refused, *self._advance(base, members, joining)]
        for request_id, _ in outcomes:
            members.running.pop(request_id, None)
            self._watched.pop(request_id, None)
        self._suspects.cleared(request_id for request_id, _ in outcomes)
        return outcomes

    def watch(self, request_id: str, feed: Feed) -> None:
        """Report the tokens of a sample to a feed, from now on or from when it joins a batch."""
        self._watched[request_id] = _Watched(feed)
        for members in self._members.values():
            if request_id in members.running:
                members.new_feeds.append(request_id)

    def unwatch(self, request_id: str) -> None:
        """Forget the feed of a sample."""
        self._watched.pop(request_id, None)

    def drop_cancelled(self) -> None:
        """Have samples that nobody wants any more leave the batches with the next step."""
        for request_id in self._backlog.take_cancelled():
            for members in self._members.values():
                work = members.running.pop(request_id, None) or members.again.pop(request_id, None)
                if work is not None:
                    members.leaving[request_id] = work

    def worker_died(self, death: WorkerDied, *, decoding: bool) -> Outcomes:
        """Take everything back that was in the worker, to be decoded again from the start; returns what is given up.

        ``decoding`` says that it died in a step of these samples. Tokens are drawn from the same seeds, so they are the same; who watches a sample is told only those that are new.
        """
        outcomes: list[tuple[str, Outcome]] = []
        for members in self._members.values():
            if decoding:
                self._suspects.died(members.running, death)
            if decoding and len(members.running) == 1:
                (request_id,) = members.running
                if self._suspects.convicted(request_id):
                    outcomes.append((request_id, failed(given_up(death))))
                    members.running.clear()
            members.again = {**members.running, **members.again}
            members.running = {}
            members.new_feeds.clear()
        for watched in self._watched.values():
            watched.sequences.clear()
        self.batches = {}
        return outcomes

    def _sources(self) -> dict[str, None]:
        busy = [source for source, members in self._members.items() if members]
        return dict.fromkeys([*busy, *self._backlog.groups_with_samples()])

    def _joining(self, base: Base, members: _Members, refused: list[tuple[str, Outcome]]) -> Iterator[Join]:
        """The samples that join the batch with this step: those that were interrupted, then those that wait."""
        room = self._max_batch - self.batches.get(base.source, Batch()).num_sequences
        while room > 0:
            if any(self._suspects.alone(request_id) for request_id in members.running):
                return
            work = next(iter(members.again.values()), None)
            if work is not None and self._suspects.alone(work.request_id) and members.running:
                return
            if work is None:
                work = self._backlog.take_sample(base.source)
            if work is None:
                return
            members.again.pop(work.request_id, None)
            try:
                join = self._join(work)
            except TinkexError as error:
                refused.append((work.request_id, failed(error)))
                continue
            room -= len(join.sequence_ids)
            members.running[work.request_id] = work
            yield join

    def _join(self, work: Work[Operation]) -> Join:
        request = work.request
        assert isinstance(request, SampleRequest)
        sampler = self._admission.sampler_of(work.tenant, request)
        return Join(
            request_id=work.request_id,
            request=_seeded(request, work.request_id),
            sequence_ids=sequence_ids(work.request_id, request.num_samples),
            owner=work.tenant,
            directory=sampler.directory,
            watched=work.request_id in self._watched,
        )

    def _advance(self, base: Base, members: _Members, joining: Sequence[Join]) -> Outcomes:
        step = SampleStep(joining, list(members.leaving), members.new_feeds)
        try:
            report = self._backend.sample(base.source, step)
        except WorkerDied:
            raise
        except Exception as error:
            logger.exception("a decode step failed in a way it should not")
            # Everyone has left the batch: it has room again.
            left = replace(self.batches.get(base.source, Batch()), num_sequences=0)
            self.batches = {**self.batches, base.source: left}
            failure = failed(EngineFailure(f"sampling failed: {type(error).__name__}: {error}"))
            return [(request_id, failure) for request_id in members.running]
        outcomes = [(request_id, cancelled()) for request_id in members.leaving]
        members.leaving, members.new_feeds = {}, []
        for growth in report.grown:
            watched = self._watched.get(growth.request_id)
            if watched is not None:
                watched.grew(growth)
        for request_id, response in report.ended:
            if isinstance(response, TinkexError):
                outcomes.append((request_id, failed(response)))
            else:
                num_tokens = self._metering.sampled(members.running[request_id], response)
                self._backlog.spent(request_id, num_tokens)
                outcomes.append((request_id, succeeded(response)))
        self.batches = {**self.batches, base.source: report.batch}
        return outcomes

    def _fail_waiting(self, source: str, error: TinkexError) -> Outcomes:
        members = self._members.pop(source, _Members())
        outcomes = [(each, failed(error)) for each in (*members.running, *members.again, *members.leaving)]
        while (work := self._backlog.take_sample(source)) is not None:
            outcomes.append((work.request_id, failed(error)))
        return outcomes


def _seeded(request: SampleRequest, request_id: str) -> SampleRequest:
    """The request with a seed: one that brings none has its own, so that its tokens are the same when they are drawn again."""
    if request.sampling_params.seed is not None:
        return request
    seed = int.from_bytes(request_id.encode())
    return msgspec.structs.replace(
        request, sampling_params=msgspec.structs.replace(request.sampling_params, seed=seed)
    )


def cancelled() -> Outcome:
    """The outcome of a sample its caller gave up."""
    return failed(InvalidInput("the request was cancelled by the client."))
