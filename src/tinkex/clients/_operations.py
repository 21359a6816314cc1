"""How operations of one run reach the server: numbered at the call, submitted in order, polled together."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from tinkex._runtime import background
from tinkex._transport.caller import encode
from tinkex.clients._ordering import Send, Turn, Turnstile
from tinkex.clients._spans import note_submitted
from tinkex.futures import AwaitableConcurrentFuture
from tinkex.observability.tracing import start_operation, use_operation

if TYPE_CHECKING:
    from tinkex._wire.endpoints import Endpoint
    from tinkex.clients.session import OpenSession, Session
    from tinkex.types import UntypedAPIFuture

__all__ = ["Operations"]

T = TypeVar("T")

Accepted: TypeAlias = "tuple[UntypedAPIFuture, float]"
"""The server's answer to a submission, and how long the submission took."""

CALLED = {"save_weights": "save_state", "load_weights": "load_state", "unload_model": "unload"}
"""What users call an operation, where the protocol has another word for it."""


class Operations:
    """Carries out the operations of one run.

    Numbers are taken when an operation is called, in the caller's thread. A called operation is submitted in
    its turn whatever happens to its future, so numbers have no gaps that a server would wait for.
    """

    def __init__(
        self,
        session: Session,
        opened: OpenSession,
        model_id: str,
        on_queue: Callable[[str, str | None], None],
    ) -> None:
        self._session = session
        self._opened = opened
        self._model_id = model_id
        self.on_queue = on_queue
        """Who is told that the server pauses or resumes an operation."""
        self._turnstile = Turnstile()

    def start(
        self,
        row: Endpoint,
        request: Callable[[int], Any],
        finish: Callable[[Any], Any] | None = None,
        *,
        request_type: str | None = None,
    ) -> AwaitableConcurrentFuture[Any]:
        """Starts an operation of one request; ``request`` makes it from its number, ``finish`` checks its result."""
        return self.start_all(
            row,
            lambda seq_ids: [request(seq_ids[0])],
            lambda results: results[0] if finish is None else finish(results[0]),
            sizes=[0],
            request_type=request_type,
        )

    def start_all(
        self,
        row: Endpoint,
        requests: Callable[[Sequence[int]], Sequence[Any]],
        finish: Callable[[list[Any]], T],
        *,
        sizes: Sequence[int],
        request_type: str | None = None,
        numbered: bool = True,
    ) -> AwaitableConcurrentFuture[T]:
        """Starts an operation that is sent in ``len(sizes)`` pieces of about so many bytes.

        One that the protocol does not number still goes out in its turn.
        """
        self._session.check_open()
        name = "forward" if request_type == "Forward" else CALLED.get(row.name, row.name)
        operation = start_operation(name, on=self._session.caller.config.tracing)
        with use_operation(operation):
            loop = background()
            accepted: list[asyncio.Future[Accepted]] = [loop.loop.create_future() for _ in sizes]
            for slot in accepted:
                slot.add_done_callback(_note)
            prepare = functools.partial(self._prepared, row, requests, sizes, accepted)
            self._turnstile.take(len(sizes) if numbered else 0, prepare)
            try:
                loop.call(self._send_due)
            except KeyboardInterrupt:
                loop.call(self._send_due)  # else it waits for the next operation
                raise
            finishing = self._finish(row, accepted, finish, request_type)
            return AwaitableConcurrentFuture(
                loop.submit(finishing, None if operation is None else operation.end)
            )

    def _prepared(
        self,
        row: Endpoint,
        requests: Callable[[Sequence[int]], Sequence[Any]],
        sizes: Sequence[int],
        accepted: Sequence[asyncio.Future[Accepted]],
        turn: Turn,
    ) -> Send:
        """What sends an operation in its turn."""
        packs = row.request_wire == "proto" and self._opened.client_config.proto_compress_fwdbwd
        compress = compressor() if packs else None
        values = requests(turn.seq_ids)
        note_submitted(self._opened, values, turn.seq_ids)
        # Encoded here and now: mistakes surface at the call, and later changes to the data do no harm.
        bodies = [encode(row, value) for value in values]
        headers: Mapping[str, str] | None = None
        if compress is not None:
            bodies, headers = [compress(body) for body in bodies], {"content-encoding": "zstd"}
        return functools.partial(self._submit, turn, row, bodies, sizes, accepted, headers)

    def _send_due(self) -> None:
        """Sends what is in line: the operation just called, and whatever an interrupt left there before."""
        for turn in self._turnstile.due():
            send, turn.send = turn.send, None
            if send is not None:
                background().spawn(send(), turn.context)

    async def _submit(
        self,
        turn: Turn,
        row: Endpoint,
        bodies: Sequence[bytes],
        sizes: Sequence[int],
        accepted: Sequence[asyncio.Future[Accepted]],
        headers: Mapping[str, str] | None,
    ) -> None:
        async with turn:
            pieces = list(zip(bodies, sizes, accepted, [headers] * len(bodies), strict=True))
            if len(pieces) > 1 and self._opened.client_config.parallel_fwdbwd_chunks:
                # The lowest number goes last: a server starts only when it has the whole call.
                await asyncio.gather(*(self._post(row, *piece) for piece in pieces[1:]))
                await self._post(row, *pieces[0])
            else:
                for piece in pieces:
                    await self._post(row, *piece)

    async def _post(
        self,
        row: Endpoint,
        body: bytes,
        size: int,
        accepted: asyncio.Future[Accepted],
        headers: Mapping[str, str] | None,
    ) -> None:
        """Submits one piece; a failure is the future's, so that the pieces and turns after it still go out."""
        began = time.monotonic()
        try:
            async with self._opened.training_bytes.reserve(size):
                answer: UntypedAPIFuture = await self._session.caller.call(row, body, headers=headers)
        except asyncio.CancelledError:
            accepted.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - nothing is hidden: whoever waits for the piece gets it
            accepted.set_exception(error)
        else:
            accepted.set_result((answer, time.monotonic() - began))

    async def _finish(
        self,
        row: Endpoint,
        accepted: Sequence[asyncio.Future[Accepted]],
        finish: Callable[[list[Any]], T],
        request_type: str | None,
    ) -> T:
        async def fetch(slot: asyncio.Future[Accepted]) -> Any:
            answer, submit_s = await asyncio.shield(slot)
            return await self._opened.results.fetch(
                row,
                answer,
                request_type=request_type,
                submit_s=submit_s,
                on_queue=self.on_queue,
                client=self._model_id,
            )

        fetching = [asyncio.ensure_future(fetch(slot)) for slot in accepted]
        try:
            results = list(await asyncio.gather(*fetching))
        finally:
            for task in fetching:
                task.cancel()
        return finish(results)


def compressor() -> Callable[[bytes], bytes] | None:
    """What makes bodies smaller for servers that ask for it, or None where zstandard is not installed."""
    try:
        import zstandard
    except ModuleNotFoundError:
        return None  # servers read bodies as they are, too
    return zstandard.ZstdCompressor().compress


def _note(slot: asyncio.Future[Accepted]) -> None:
    """Reads the outcome of a submission nobody waits for, so that asyncio does not complain about it."""
    if not slot.cancelled():
        slot.exception()
