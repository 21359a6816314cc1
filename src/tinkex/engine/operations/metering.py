"""Counting what users use; it is recorded with the results it belongs to, so nothing is counted twice or lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tinkex.engine.operations.backlog import Operation
from tinkex.engine.operations.execution import Ended
from tinkex.engine.operations.recording import Effect
from tinkex.engine.scheduler import Kind, Work
from tinkex.engine.store import HOUR_S, Account, FutureStatus, Store, UsageKind
from tinkex.types import SampleRequest, SampleResponse

SAVES = frozenset({Kind.SAVE, Kind.SAVE_FOR_SAMPLER, Kind.SAVE_EXTERNAL})


class Metering:
    """What was used since the last commit. Belongs to the engine thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._amounts: Counter[Account] = Counter()
        self.totals: Mapping[UsageKind, int] = dict.fromkeys(UsageKind, 0)
        """What all users used since the engine started; never changed, only replaced, so any thread may read it."""

    def trained(self, ended: Iterable[Ended]) -> None:
        """Count the passes and saves of a turn that succeeded."""
        for each in ended:
            work = each.work
            if each.outcome.status is not FutureStatus.DONE:
                continue
            if work.kind.packs:
                self._count(work, UsageKind.TRAINING, work.num_tokens)
            elif work.kind in SAVES and getattr(work.request, "path", None) is not None:
                self._count(work, UsageKind.CHECKPOINT, 1)

    def sampled(self, work: Work[Operation], response: SampleResponse) -> int:
        """Count a sample that ended; returns how many tokens it took, of prompt and answers."""
        assert isinstance(work.request, SampleRequest)
        cached = response.prompt_cache_hit_tokens
        self._count(work, UsageKind.PREFILL_CACHED, cached)
        self._count(work, UsageKind.PREFILL, max(work.request.prompt.length - cached, 0))
        drawn = sum(len(sequence.tokens_np) for sequence in response.sequences)
        self._count(work, UsageKind.SAMPLE, drawn)
        return work.request.prompt.length + drawn

    def take(self) -> Sequence[Effect]:
        """What is to be recorded with the next commit."""
        if not self._amounts:
            return ()
        amounts, self._amounts = self._amounts, Counter()
        return (lambda: self._store.usage.add(amounts),)

    def _count(self, work: Work[Operation], kind: UsageKind, amount: int) -> None:
        if amount <= 0:
            return
        named = (
            self._store.samplers.get(work.run_id)
            if work.kind is Kind.SAMPLE
            else self._store.runs.get(work.run_id)
        )
        if named is not None:
            session_id, base_model = named.session_id, named.base_model
        else:
            session_id, base_model = "", getattr(work.request, "base_model", None) or ""
        hour = int(time.time()) // HOUR_S * HOUR_S
        self.totals = {**self.totals, kind: self.totals[kind] + amount}
        self._amounts[Account(hour, work.tenant, session_id, base_model, kind)] += amount
