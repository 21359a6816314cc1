"""How much may wait, for each user and for all."""

from __future__ import annotations

from dataclasses import dataclass

from tinkex.errors import Busy, OverQuota


@dataclass(frozen=True)
class Budgets:
    """Limits for operations that have no outcome yet; see :class:`~tinkex.engine.config.EngineConfig`."""

    max_operations: int = 20_000
    """Of one user."""
    max_bytes_per_user: int = 256 * 2**20
    max_bytes: int = 1024 * 2**20
    reserve_bytes: int = 64 * 2**20
    """What may exceed them for operations that others wait for; such an operation can run now, and makes room."""
    max_held_bytes: int = 64 * 2**20
    """Memory of the requests of waiting operations; those of further ones are only on disk."""
    max_tokens_per_s: int | None = None
    """Of one user."""

    def check_operations(self, num_pending: int) -> None:
        """Raise ``OverQuota`` if a user has as many operations as may wait."""
        if num_pending >= self.max_operations:
            raise OverQuota(
                f"{self.max_operations} operations of yours are waiting already; fetch their results, then submit more."
            )

    def check_bytes(self, num_bytes: int, own: int, total: int, *, others_wait: bool) -> None:
        """Raise ``OverQuota`` or ``Busy`` if a request of this size has no room beside the user's ``own`` bytes and the ``total``.

        One that ``others_wait`` for may exceed the budgets by the reserve. One of any size is accepted where none waits, or it
        never could be.
        """
        more = num_bytes - self.reserve_bytes if others_wait else num_bytes
        if own and own + more > self.max_bytes_per_user:
            raise OverQuota(
                f"your waiting operations have {own} bytes, this one has {num_bytes}, and {self.max_bytes_per_user} is the limit "
                "per user; submit it again when some have ended."
            )
        if total and total + more > self.max_bytes:
            raise Busy(
                f"the waiting operations of all users have {total} bytes, this one has {num_bytes}, and {self.max_bytes} is this "
                "server's limit; submit it again later."
            )

    def check_rate(self, wait_s: float) -> None:
        """Raise ``OverQuota`` if a user's tokens are used up for a while."""
        if wait_s > 0:
            error = OverQuota(
                f"a user may have {self.max_tokens_per_s} tokens computed in a second, and yours are used up for "
                f"{wait_s:.1f} s; submit it again then."
            )
            error.retry_after_s = wait_s
            raise error
