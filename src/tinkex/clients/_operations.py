"""Submits the operations of one run: numbered when they are called, submitted in order, polled concurrently."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from tinkex import types
from tinkex._runtime import background
from tinkex._transport.caller import encode
from tinkex.clients._ordering import OperationHolds, Send, Sequencer, Submission
from tinkex.clients._queue_state import callback_of
from tinkex.clients._spans import note_submitted
from tinkex.errors import APIResponseValidationError
from tinkex.futures import AwaitableConcurrentFuture
from tinkex.observability.tracing import start_operation, use_operation

if TYPE_CHECKING:
    from tinkex._wire.endpoints import Endpoint
    from tinkex.clients._queue_state import Observer
    from tinkex.clients.session import OpenSession, Session
    from tinkex.observability.queues import QueueCallback
    from tinkex.types import UntypedAPIFuture

__all__ = ["OperationSubmitter", "named_export", "named_save", "require_field"]

T = TypeVar("T")

Accepted: TypeAlias = "tuple[UntypedAPIFuture, float]"
"""The server's reply to a submission, and the duration of the submission."""

METHOD_NAMES = {"save_weights": "save_state", "load_weights": "load_state", "unload_model": "unload"}
"""The client methods of operations that the protocol calls by another name."""


class OperationSubmitter:
    """Submits the operations of one run.

    Numbers are taken when an operation is called, in the caller's thread. The operation is then submitted in
    its turn whatever happens to its future, so that there are no gaps in the numbers, which a server would wait for.
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
        """Called when the server pauses or resumes an operation."""
        self._sequencer = Sequencer()
        self._holds = OperationHolds()
        self.hold = self._holds.hold

    def start(
        self,
        endpoint: Endpoint,
        request: Callable[[int], Any],
        finish: Callable[[Any], Any] | None = None,
        *,
        request_type: str | None = None,
        observer: Observer = None,
    ) -> AwaitableConcurrentFuture[Any]:
        """Starts an operation of one request; ``request`` builds it from its number, ``finish`` converts its result."""
        return self.start_all(
            endpoint,
            lambda seq_ids: [request(seq_ids[0])],
            lambda results: results[0] if finish is None else finish(results[0]),
            sizes=[0],
            request_type=request_type,
            observer=observer,
        )

    def start_all(
        self,
        endpoint: Endpoint,
        requests: Callable[[Sequence[int]], Sequence[Any]],
        finish: Callable[[list[Any]], T],
        *,
        sizes: Sequence[int],
        request_type: str | None = None,
        numbered: bool = True,
        observer: Observer = None,
    ) -> AwaitableConcurrentFuture[T]:
        """Starts an operation that is sent in ``len(sizes)`` chunks of about so many bytes.

        An operation without numbers in the protocol is still submitted in its turn. ``observer`` receives its queue states
        instead of the client's.
        """
        self._session.check_open()
        on_queue = self.on_queue if observer is None else callback_of(observer)
        start = functools.partial(
            self._start_now, endpoint, requests, finish, sizes, request_type, numbered, on_queue
        )
        return self._holds.put_off(start) or start()

    def _start_now(
        self,
        endpoint: Endpoint,
        requests: Callable[[Sequence[int]], Sequence[Any]],
        finish: Callable[[list[Any]], T],
        sizes: Sequence[int],
        request_type: str | None,
        numbered: bool,
        on_queue: QueueCallback,
    ) -> AwaitableConcurrentFuture[T]:
        name = "forward" if request_type == "Forward" else METHOD_NAMES.get(endpoint.name, endpoint.name)
        operation = start_operation(name, on=self._session.caller.config.tracing)
        with use_operation(operation):
            loop = background()
            accepted: list[asyncio.Future[Accepted]] = [loop.loop.create_future() for _ in sizes]
            for slot in accepted:
                slot.add_done_callback(_retrieve_exception)
            prepare = functools.partial(self._prepare, endpoint, requests, sizes, accepted)
            self._sequencer.add(len(sizes) if numbered else 0, prepare)
            try:
                loop.call(self._send_queued)
            except KeyboardInterrupt:
                loop.call(self._send_queued)  # otherwise it would wait for the next operation
                raise
            finishing = self._finish(endpoint, accepted, finish, request_type, on_queue)
            return loop.submit(
                finishing,
                None if operation is None else operation.end,
                self._session.caller.done_callbacks,
            )

    def _prepare(
        self,
        endpoint: Endpoint,
        requests: Callable[[Sequence[int]], Sequence[Any]],
        sizes: Sequence[int],
        accepted: Sequence[asyncio.Future[Accepted]],
        submission: Submission,
    ) -> Send:
        """Encodes the requests of an operation, and returns the function that submits them."""
        compresses = endpoint.request_wire == "proto" and self._opened.client_config.proto_compress_fwdbwd
        compress = compressor() if compresses else None
        values = requests(submission.seq_ids)
        note_submitted(self._opened, values, submission.seq_ids)
        # Encoded in the call: errors are raised there, and later changes of the data have no effect.
        bodies = [encode(endpoint, value) for value in values]
        headers: Mapping[str, str] | None = None
        if compress is not None:
            bodies, headers = [compress(body) for body in bodies], {"content-encoding": "zstd"}
        return functools.partial(self._submit, submission, endpoint, bodies, sizes, accepted, headers)

    def _send_queued(self) -> None:
        """Submits the operation just called, and those that an interrupt left in the queue."""
        for submission in self._sequencer.unsent():
            send, submission.send = submission.send, None
            if send is not None:
                background().spawn(send(), submission.context)

    async def _submit(
        self,
        submission: Submission,
        endpoint: Endpoint,
        bodies: Sequence[bytes],
        sizes: Sequence[int],
        accepted: Sequence[asyncio.Future[Accepted]],
        headers: Mapping[str, str] | None,
    ) -> None:
        async with submission:
            chunks = list(zip(bodies, sizes, accepted, [headers] * len(bodies), strict=True))
            if len(chunks) > 1 and self._opened.client_config.parallel_fwdbwd_chunks:
                # The lowest number is sent last: a server starts only when it has the whole call.
                await asyncio.gather(*(self._post(endpoint, *chunk) for chunk in chunks[1:]))
                await self._post(endpoint, *chunks[0])
            else:
                for chunk in chunks:
                    await self._post(endpoint, *chunk)

    async def _post(
        self,
        endpoint: Endpoint,
        body: bytes,
        size: int,
        accepted: asyncio.Future[Accepted],
        headers: Mapping[str, str] | None,
    ) -> None:
        """Submits one chunk; an error goes to its future, so that later chunks and operations are still submitted."""
        began = time.monotonic()
        try:
            async with self._opened.training_bytes.reserve(size):
                reply: UntypedAPIFuture = await self._session.caller.call(endpoint, body, headers=headers)
        except asyncio.CancelledError:
            accepted.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - nothing is hidden: the future raises it
            accepted.set_exception(error)
        else:
            accepted.set_result((reply, time.monotonic() - began))

    async def _finish(
        self,
        endpoint: Endpoint,
        accepted: Sequence[asyncio.Future[Accepted]],
        finish: Callable[[list[Any]], T],
        request_type: str | None,
        on_queue: QueueCallback,
    ) -> T:
        async def fetch(slot: asyncio.Future[Accepted]) -> Any:
            reply, submit_s = await asyncio.shield(slot)
            return await self._opened.results.fetch(
                endpoint,
                reply,
                request_type=request_type,
                submit_s=submit_s,
                on_queue=on_queue,
                client=self._model_id,
            )

        fetching = [asyncio.ensure_future(fetch(slot)) for slot in accepted]
        try:
            results = list(await asyncio.gather(*fetching))
        finally:
            for task in fetching:
                task.cancel()
        return finish(results)


def require_field(field: str, value: str | None, what: str) -> str:
    """Returns a field of a reply; raises if the server has left it out."""
    if value is None:
        raise APIResponseValidationError(None, None, f"the reply to {what} has no {field}")
    return value


def named_save(saved: types.SaveWeightsForSamplerResponseInternal) -> types.SaveWeightsForSamplerResponse:
    """The result of saving weights for sampling under a name, from the server's reply."""
    path = require_field("path", saved.path, "a named save")
    return types.SaveWeightsForSamplerResponse(path=path, type=saved.type)


def named_export(saved: types.SaveWeightsExternalResponseInternal) -> types.SaveWeightsExternalResponse:
    """The result of an export, from the server's reply."""
    path = require_field("path", saved.path, "an export")
    return types.SaveWeightsExternalResponse(path=path, size_bytes=saved.size_bytes, type=saved.type)


def compressor() -> Callable[[bytes], bytes] | None:
    """Compresses bodies for servers that request it; None if zstandard is not installed."""
    try:
        import zstandard
    except ModuleNotFoundError:
        return None  # servers accept uncompressed bodies, too
    return zstandard.ZstdCompressor().compress


def _retrieve_exception(slot: asyncio.Future[Accepted]) -> None:
    """Retrieves the exception of a submission without a waiter, so that asyncio does not warn about it."""
    if not slot.cancelled():
        slot.exception()
