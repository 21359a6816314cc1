"""The overview: health, models, lanes, who waits for what, and how fast tokens are computed, live."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

from starlette.responses import Response

from tinkex.engine.api.dashboard.rendering import render_part
from tinkex.engine.api.dashboard.site import ENDED, Visit, event
from tinkex.engine.engine import Engine, EngineStats
from tinkex.engine.store import HOUR_S, UsageKind
from tinkex.engine.store.listings import Listings, RunFilter, WaitingOperations
from tinkex.errors import TinkexError

INTERVAL_S = 2.0
RATE_WINDOW_S = 20.0
"""Rates are means over so long."""
STATS_TTL_S = 1.0
"""How long statistics of the engine are used for all viewers."""
MAX_GROUPS = 50


@dataclass(frozen=True)
class QueueEntry:
    """Operations of a user that wait, and the reason of the first one."""

    waiting: WaitingOperations
    reason: str
    runs: bool
    """Whether the first one runs now."""


@dataclass(frozen=True)
class Status:
    """What the overview shows at one time."""

    state: str
    status: str
    stats: EngineStats | None
    queue: Sequence[QueueEntry]
    num_others: int
    """Unfinished operations of other users, for those who do not see them."""
    trained_per_s: float
    sampled_per_s: float
    runs: Mapping[str, int]
    """By status."""
    storage: int
    memory: int | None


@dataclass
class _Rates:
    """Tokens trained and sampled by one user, or by all, as they were counted at some times."""

    counts: deque[tuple[float, int, int]] = field(default_factory=deque)

    def add(self, now: float, trained: int, sampled: int) -> tuple[float, float]:
        """Returns both per second over the window.

        >>> rates = _Rates()
        >>> rates.add(0.0, 0, 0), rates.add(2.0, 100, 10)
        ((0.0, 0.0), (50.0, 5.0))
        """
        counts = self.counts
        if counts and (trained < counts[-1][1] or sampled < counts[-1][2]):
            counts.clear()  # old hours are no longer counted
        counts.append((now, trained, sampled))
        while now - counts[0][0] > RATE_WINDOW_S and len(counts) > 2:
            counts.popleft()
        then, old_trained, old_sampled = counts[0]
        seconds = now - then
        if seconds <= 0:
            return 0.0, 0.0
        return (trained - old_trained) / seconds, (sampled - old_sampled) / seconds


_STATS: WeakKeyDictionary[Engine, tuple[float, EngineStats]] = WeakKeyDictionary()


async def overview(visit: Visit) -> Response:
    """The page."""
    status = await visit.read(lambda: _status(visit, _Rates()))
    recent = await visit.read(lambda: visit.site.listings.runs(visit.owner, RunFilter(), 8, 0))
    return visit.page("overview.html", "overview", "Overview", status=status, recent=recent)


async def follow_overview(visit: Visit) -> Response:
    """The same, whenever something changes."""
    return visit.events(_events(visit))


async def _events(visit: Visit) -> AsyncGenerator[bytes, None]:
    rates = _Rates()
    while True:
        status = await visit.read(lambda: _status(visit, rates))
        html = render_part("overview_status.html", status=status, viewer=visit.viewer)
        yield event(
            {
                "html": html,
                "at": time.time(),
                "trained": status.trained_per_s,
                "sampled": status.sampled_per_s,
            }
        )
        if not await visit.until_change(INTERVAL_S):
            yield ENDED
            return


def _status(visit: Visit, rates: _Rates) -> Status:
    engine, listings, owner = visit.site.engine, visit.site.listings, visit.owner
    now = time.time()
    used = _tokens(listings, owner, now)
    trained_per_s, sampled_per_s = rates.add(
        now, used.get(UsageKind.TRAINING, 0), used.get(UsageKind.SAMPLE, 0)
    )
    waiting = listings.waiting(owner, MAX_GROUPS)
    num_others = 0
    if owner is not None:
        num_others = sum(each.count for each in listings.waiting(None, MAX_GROUPS) if each.owner != owner)
    stored = sum(sum(kinds.values()) for kinds in listings.storage(owner).values())
    return Status(
        state=engine.health.state if engine is not None else "read-only",
        status=engine.health.status if engine is not None else "files of an engine, opened read-only",
        stats=_stats(engine) if engine is not None else None,
        queue=[_entry(engine, each) for each in waiting],
        num_others=num_others,
        trained_per_s=trained_per_s,
        sampled_per_s=sampled_per_s,
        runs=listings.count_runs_by_status(owner),
        storage=stored,
        memory=_resident_bytes(engine) if engine is not None and visit.viewer.sees_all else None,
    )


def _entry(engine: Engine | None, waiting: WaitingOperations) -> QueueEntry:
    if engine is None:
        return QueueEntry(waiting, "recorded; the engine that holds these files knows more", runs=False)
    try:
        state = engine.queue_state(waiting.request_id)
    except TinkexError as error:
        return QueueEntry(waiting, str(error), runs=False)
    return QueueEntry(waiting, state.reason, runs=state.reason == "running now")


def _tokens(listings: Listings, owner: str | None, now: float) -> Mapping[str, int]:
    """Tokens by kind since the hour before."""
    since = now // HOUR_S * HOUR_S - HOUR_S
    totals: dict[str, int] = {}
    for kinds in listings.usage(owner, since).values():
        for kind, amount in kinds.items():
            totals[kind] = totals.get(kind, 0) + amount
    return totals


def _stats(engine: Engine) -> EngineStats:
    """The statistics, read once for all who look at about the same time."""
    known = _STATS.get(engine)
    if known is not None and time.monotonic() - known[0] < STATS_TTL_S:
        return known[1]
    stats = engine.stats()
    _STATS[engine] = (time.monotonic(), stats)
    return stats


def _resident_bytes(engine: Engine) -> int | None:
    """The memory of the server and its workers, where /proc has it."""
    import resource

    pids = ["self", *(str(worker.pid) for worker in engine.workers.values() if worker and worker.pid)]
    pages = 0
    try:
        for pid in pids:
            pages += int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * resource.getpagesize()
