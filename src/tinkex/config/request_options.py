"""Options of one request: timeouts, retries, extra headers; with the names and fields of the official SDK."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

__all__ = ["RequestOptions", "Timeout"]

_UNSET: Any = object()


class Timeout:
    """Timeouts in seconds: one for all phases of a request, or one for each; None means no limit.

    >>> Timeout(60.0, connect=5.0)
    Timeout(connect=5.0, read=60.0, write=60.0, pool=60.0)
    """

    __slots__ = ("connect", "pool", "read", "write")

    def __init__(
        self,
        timeout: float | tuple[float | None, ...] | Timeout | None = _UNSET,
        *,
        connect: float | None = _UNSET,
        read: float | None = _UNSET,
        write: float | None = _UNSET,
        pool: float | None = _UNSET,
    ) -> None:
        given = {"connect": connect, "read": read, "write": write, "pool": pool}
        for place, phase in enumerate(given):
            if given[phase] is not _UNSET:
                continue
            if timeout is _UNSET:
                raise ValueError(
                    f"Timeout needs a limit for all phases, or one for each; {phase!r} is missing"
                )
            if isinstance(timeout, Timeout):
                given[phase] = getattr(timeout, phase)
            elif isinstance(timeout, tuple):
                given[phase] = timeout[place] if place < len(timeout) else None
            else:
                given[phase] = timeout
        self.connect, self.read, self.write, self.pool = given.values()

    def as_dict(self) -> dict[str, float | None]:
        """Returns the four timeouts by name."""
        return {"connect": self.connect, "read": self.read, "write": self.write, "pool": self.pool}

    def __eq__(self, other: object) -> bool:
        return self.as_dict() == other.as_dict() if isinstance(other, Timeout) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.as_dict().values()))

    def __repr__(self) -> str:
        return f"Timeout({', '.join(f'{phase}={limit}' for phase, limit in self.as_dict().items())})"


class RequestOptions(TypedDict, total=False):
    """Options of one request."""

    headers: Mapping[str, str]
    max_retries: int
    timeout: float | Timeout | None
    params: Mapping[str, object]
    extra_json: Mapping[str, object]
    idempotency_key: str
    follow_redirects: bool
