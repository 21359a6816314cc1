"""Large replies: sent in parts, no faster than the client reads them, and counted until they are sent.

Without this, a client that asks for results and does not read them would keep all of them in the server's memory.
"""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinkex.engine.api.body_budget import BodyBudget, BodyReservation

MAX_SMALL_BYTES = 64 * 1024
"""Up to this size a reply is left to the connection, whose buffer holds as much."""
PART_BYTES = 64 * 1024

REPLIES_PER_USER, REPLIES_IN_TOTAL = 4, 16
"""How many times ``max_body_bytes`` the replies may have that are not sent yet."""


def reply_budget(max_body_bytes: int) -> BodyBudget:
    """Returns the budget of replies, per user and in total."""
    return BodyBudget(
        REPLIES_PER_USER * max_body_bytes,
        REPLIES_IN_TOTAL * max_body_bytes,
        "replies",
        "read the replies to earlier requests first",
    )


class LargeReply(Response):
    """A reply that is sent in parts; its bytes count until the last one was passed to the connection."""

    def __init__(self, reply: Response, reservation: BodyReservation) -> None:
        super().__init__(status_code=reply.status_code)
        self.raw_headers = reply.raw_headers
        self.body = reply.body
        self._reservation = reservation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts; each waits until the client has read most of the one before."""
        del scope, receive  # unused
        body = memoryview(self.body)
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            for start in range(0, len(body), PART_BYTES):
                end = start + PART_BYTES
                part = bytes(body[start:end])
                await send({"type": "http.response.body", "body": part, "more_body": end < len(body)})
        finally:
            self._reservation.release()


def bounded(reply: Response, reservation: BodyReservation) -> Response:
    """Returns the reply as it is sent; raises :class:`OverQuota` or :class:`Busy` if too many bytes are not sent yet."""
    if type(reply) is not Response or len(reply.body) <= MAX_SMALL_BYTES:
        return reply
    reservation.add(max(0, len(reply.body) - reservation.num_bytes))
    return LargeReply(reply, reservation)
