"""How many runs may be in memory together, so that a turn needs no more than that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RunLimits:
    """The limits, None for none, and the sizes of runs.

    >>> limits = RunLimits(max_bytes=100, max_runs=4)
    >>> limits.are_exceeded(num_bytes=100, num_runs=4), limits.are_exceeded(num_bytes=101, num_runs=1)
    (False, True)
    """

    max_bytes: int | None = None
    max_runs: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes by run; a run that is not here counts as 0."""

    def are_exceeded(self, num_bytes: int, num_runs: int) -> bool:
        """Whether so many bytes of so many runs are too much."""
        return (self.max_bytes is not None and num_bytes > self.max_bytes) or (
            self.max_runs is not None and num_runs > self.max_runs
        )


NO_LIMITS = RunLimits()


class RunMembers:
    """The runs of a turn: as many as may be in memory together, and at least one.

    >>> members = RunMembers(RunLimits(max_bytes=100, sizes={"a": 60, "b": 60}))
    >>> members.add("a")
    >>> members.admits("a"), members.admits("b")
    (True, False)
    """

    def __init__(self, limits: RunLimits) -> None:
        self._limits = limits
        self._run_ids: set[str] = set()
        self._bytes = 0

    def admits(self, run_id: str) -> bool:
        """Whether a run fits beside the others."""
        if not self._run_ids or run_id in self._run_ids:
            return True
        num_bytes = self._bytes + self._limits.sizes.get(run_id, 0)
        return not self._limits.are_exceeded(num_bytes, len(self._run_ids) + 1)

    def add(self, run_id: str) -> None:
        """Add a run."""
        if run_id not in self._run_ids:
            self._run_ids.add(run_id)
            self._bytes += self._limits.sizes.get(run_id, 0)
