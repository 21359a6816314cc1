"""The sampling client: samples and logprobs from one fixed set of weights."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from tinkex import types
from tinkex._runtime import background, run_in_daemon_thread
from tinkex._transport.budget import Slots
from tinkex._transport.retry import is_transient
from tinkex._wire.endpoints import endpoint
from tinkex.clients._checks import check_offered, check_prompt_options, check_sample
from tinkex.clients._chunking import prompt_bytes
from tinkex.clients._completions import Completions
from tinkex.clients._copies import SEQ_IDS_PER_COPY, make_copy, restored
from tinkex.clients._docstrings import documented
from tinkex.clients._handles import SamplerHandle
from tinkex.clients._open_sampling import open_sampling_client
from tinkex.clients._pacing import submit_paced
from tinkex.clients._pending import Pending, PendingText, PendingValue, pending_text
from tinkex.clients._queue_state import QueueStateMixin, callback_of
from tinkex.clients._retries import Retries
from tinkex.clients._sample_body import sample_body
from tinkex.clients._spans import follow, note_sampled, sampling_span
from tinkex.clients._streaming import AsyncSampleStream, SampleStream, StreamContext, StreamSource
from tinkex.clients._twins import async_form
from tinkex.clients._warnings import warn_about_deprecated_names
from tinkex.clients._watchdog import ProgressWatchdog
from tinkex.clients.retry_config import RetryConfig
from tinkex.errors import APIResponseValidationError, APIStatusError
from tinkex.observability.tracing import trace_operation

if TYPE_CHECKING:
    from tinkex.clients._pending import PendingSamplingClient, PendingTokenizer
    from tinkex.clients._queue_state import Observer
    from tinkex.clients.session import OpenSession, Session
    from tinkex.config import Config
    from tinkex.futures import AwaitableConcurrentFuture
    from tinkex.observability.queues import QueueCallback
    from tinkex.observability.telemetry.reporter import Reporter
    from tinkex.tokenizers import Tokenizer

__all__ = ["RetryConfig", "SamplingClient"]

UNBOUNDED = 1_000_000_000
BACKPRESSURE = {"x-tinker-sampling-backpressure": "1"}


@documented("client")
class SamplingClient(QueueStateMixin):
    """Samples from one fixed set of weights: a base model, a checkpoint, or a snapshot of a run.

    ::

        future = client.sample(prompt, num_samples=4, sampling_params=tinkex.SamplingParams(max_tokens=32))
        for sequence in future.result().sequences:
            print(tokenizer.decode(sequence.tokens))

    Any number of calls may be in flight; the client limits their submission to the rate that the server accepts. It can be
    pickled into another process, API key included, and samples from the same weights there.
    """

    def __init__(
        self,
        session: Session,
        opened: OpenSession,
        *,
        sampling_session_id: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        copy: int | None = 0,
    ) -> None:
        self._sampling_session_id = sampling_session_id
        self._session = session
        self._opened = opened
        self._given_retry_config = retry_config
        self._retry_config = retry_config or RetryConfig()
        self._record_stability_info = record_stability_info
        self._known_base_model: str | None = None
        self._copy = copy
        """The number of this copy, 0 for the original client; None until the server has assigned it."""
        self._join_lock = asyncio.Lock()
        self._numbers = itertools.count()
        self._completions: Completions | None = None
        server_limit = opened.client_config.sample_max_concurrent_requests
        if opened.client_config.sample_use_retrieve_futures:
            self._completions = Completions(
                session.caller,
                lambda: types.SamplingSessionFuturesTarget(
                    sampling_session_id=sampling_session_id, cloned_sampler_id=self._copy or 0
                ),
                lambda request_id: opened.results.poll_queue(
                    _SAMPLE, request_id, sampling_session_id, self._notify_queue_state
                ),
            )
            server_limit = UNBOUNDED  # pending samples use no connection
        own_limit = None if retry_config is None else retry_config.max_connections
        self._in_flight = Slots(server_limit if own_limit is None else min(own_limit, server_limit))
        watched = (
            self._retry_config.enable_stuck_detection and opened.client_config.sample_enable_stuck_detection
        )
        self._watchdog = ProgressWatchdog(self._retry_config.progress_timeout if watched else None)
        self._retries = Retries(
            self._retry_config,
            self._retry_config.policy(watched=watched, max_retries=session.caller.config.max_retries),
            not opened.client_config.sample_no_retries,
            session,
        )
        # Backpressure pauses every sample of the session, so the call itself is not retried.
        self._submit_policy = replace(
            session.caller.policy, raised_statuses=frozenset({402, 429}), payment_pause_s=0.0
        )
        if self._retries.submits_once:
            self._submit_policy = replace(self._submit_policy, max_retries=0)
        warn_about_deprecated_names(self, self.config)

    def sample(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
        *,
        queue_state_observer: Observer = None,
    ) -> AwaitableConcurrentFuture[types.SampleResponse]:
        """Samples ``num_samples`` continuations of a prompt; cancelling the future cancels the sample.

        ::

            prompt = types.ModelInput.from_ints(tokenizer.encode("The sea is"))
            response = client.sample(prompt, 2, types.SamplingParams(max_tokens=16)).result()
            print([tokenizer.decode(one.tokens) for one in response.sequences])

        ``max_tokens`` is capped at the rest of the context, and the sequence then ends with ``stop_reason`` ``length``.
        ``include_prompt_logprobs`` adds the logprob of every prompt token, or of the last
        ``prompt_logprobs_last_n``; the top-k arguments add the top-k tokens at each position.
        ``queue_state_observer`` is notified of the queue states of this call, instead of the client's observer.
        """
        self._check_usable()
        check_sample(prompt, num_samples, sampling_params)
        request = types.SampleRequest(
            prompt=prompt,
            sampling_params=sampling_params,
            num_samples=num_samples,
            sampling_session_id=self._sampling_session_id,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
            target_prompt_logprobs=target_prompt_logprobs,
            prompt_alt_tokens_k=prompt_alt_tokens_k,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
        )
        check_prompt_options(request)
        check_offered(request.sampling_params, self._opened.client_config)
        sampling = self._sample(request, self._queue_callback(queue_state_observer))
        return follow(self._session, sampling_span("sample", self._session, self._opened, request), sampling)

    sample_async = async_form(sample)

    def sample_stream(
        self, prompt: types.ModelInput, num_samples: int, sampling_params: types.SamplingParams
    ) -> SampleStream:
        """Samples continuations of a prompt and returns every token as it is sampled; closing the stream cancels the sample.

        ::

            with client.sample_stream(prompt, 1, tinkex.SamplingParams(max_tokens=32)) as stream:
                for event in stream:
                    if isinstance(event, tinkex.types.SampledToken):
                        print(event.text, end="", flush=True)
        """
        return SampleStream(self._stream(prompt, num_samples, sampling_params))

    # Not derived: the two forms return different types of streams.
    async def sample_stream_async(
        self, prompt: types.ModelInput, num_samples: int, sampling_params: types.SamplingParams
    ) -> AsyncSampleStream:
        """As :meth:`sample_stream`; the stream is an async iterator."""
        return AsyncSampleStream(self._stream(prompt, num_samples, sampling_params))

    def compute_logprobs(
        self,
        prompt: types.ModelInput,
        prompt_logprobs_last_n: int | None = None,
        *,
        queue_state_observer: Observer = None,
    ) -> AwaitableConcurrentFuture[list[float | None]]:
        """The logprob of every token of a prompt given those before it; None for the first."""
        self._check_usable()
        params = types.SamplingParams(max_tokens=1)
        check_sample(prompt, 1, params)
        request = types.SampleRequest(
            prompt=prompt,
            sampling_params=params,
            num_samples=1,
            sampling_session_id=self._sampling_session_id,
            prompt_logprobs=True,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
        )
        check_prompt_options(request)
        computing = self._logprobs(request, self._queue_callback(queue_state_observer))
        return follow(
            self._session, sampling_span("compute_logprobs", self._session, self._opened, request), computing
        )

    compute_logprobs_async = async_form(compute_logprobs)

    def get_base_model(self) -> PendingText:
        """The name of the base model behind these weights. A client that was created on an event loop has it."""
        self._check_usable()
        return pending_text(self._known_base_model, self._base_model)

    get_base_model_async = async_form(get_base_model)

    def get_tokenizer(self) -> PendingTokenizer:
        """The tokenizer of the base model: a ``transformers`` one where that is installed, else our own."""
        self._check_usable()
        return cast("PendingTokenizer", PendingValue(None, self._tokenizer()))

    # ---- other processes, other names ----

    @staticmethod
    def create(
        holder: Session,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        sampling_session_id: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> AwaitableConcurrentFuture[SamplingClient]:
        """A sampling client in the session of ``holder``, with a new sampler or an existing one."""
        return background().submit(
            open_sampling_client(
                holder,
                model_path=model_path,
                base_model=base_model,
                sampling_session_id=sampling_session_id,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )
        )

    def get_sampler_handle(self) -> PendingText:
        """A string from which :meth:`from_sampler_handle` creates a client of this sampler, in any process.

        It contains no credentials, unlike a pickled client.
        """
        self._check_transferable()
        handle = SamplerHandle(
            self._opened.session_id,
            self._sampling_session_id,
            self._session.caller.config.base_url,
            self._opened.client_config,
            self._session.dynamic_config,
            self._record_stability_info,
        )
        return PendingText(handle.text())

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> PendingSamplingClient:
        """A client of the sampler behind a handle, with this process's own key or ``api_key``."""
        from tinkex.config import Config

        said = SamplerHandle.parse(handle)
        return cast(
            "PendingSamplingClient",
            Pending.of(
                restored(
                    Config.resolve(base_url=said.base_url, api_key=api_key),
                    said.session_id,
                    said.client_config,
                    said.sampling_session_id,
                    None,
                    said.record_stability_info,
                    said.dynamic_config,
                ),
            ),
        )

    def get_telemetry(self) -> Reporter | None:
        """The telemetry of this session; None before the session is open, and if telemetry is off."""
        return self._session.telemetry

    @property
    def config(self) -> Config:
        """The settings of this client; its ``repr`` shows no secrets."""
        return self._session.caller.config

    @property
    def holder(self) -> Session:
        """The session this client belongs to."""
        return self._session

    @holder.setter
    def holder(self, session: Session) -> None:
        self._session = session

    def __repr__(self) -> str:
        return f"SamplingClient(sampling_session_id={self._sampling_session_id!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_transferable()
        return restored, (
            self._session.caller.config,
            self._opened.session_id,
            self._opened.client_config,
            self._sampling_session_id,
            self._given_retry_config,
            self._record_stability_info,
            self._session.dynamic_config,
        )

    def _check_transferable(self) -> None:
        from tinkex._transport.shared import SharedHttp

        if not isinstance(self._session.caller.transport, SharedHttp):
            raise TypeError(
                "this sampling client cannot be used in another process, because its engine is in this one; "
                "start one with 'tinkex serve' and give its address as base_url"
            )

    def _check_usable(self) -> None:
        """Raises ``ClosedError`` if the session was closed; in a forked child the client becomes a copy, as if pickled."""
        if self._session.pid != os.getpid():
            make_copy(self, *self.__reduce__()[1])
        self._session.check_open()

    # ---- submission ----

    def _stream(self, prompt: types.ModelInput, number: int, params: types.SamplingParams) -> StreamSource:
        self._check_usable()
        context = StreamContext(
            self._session, self._opened, self._in_flight, self._next_seq_id, self._sample, self._retries
        )
        return StreamSource.of(
            context, prompt, number, params, self._sampling_session_id, self._record_stability_info
        )

    async def _sample(
        self, request: types.SampleRequest, on_queue: QueueCallback | None = None
    ) -> types.SampleResponse:
        """Submits and polls; again, with a new number if it was accepted, if the result expired or the server failed."""
        size = prompt_bytes(request.prompt)
        attempt = 0
        seq_id: int | None = None
        async with self._watchdog.watch(), self._in_flight:
            while True:
                try:
                    if seq_id is None:
                        seq_id = await self._next_seq_id()
                    began = time.monotonic()
                    accepted = await self._submit(sample_body(request, seq_id), size)
                    seq_id = None
                    return await self._result(request, accepted, time.monotonic() - began, on_queue)
                except self._retries.kinds as error:
                    await self._retries.pause(_SAMPLE.name, error, attempt, self._watchdog.idle_s)
                    attempt += 1
                    if isinstance(error, APIStatusError) and not is_transient(error.status_code):
                        seq_id = None  # a rejected request has used its number

    def _notify_queue_state(self, queue_state: str, queue_state_reason: str | None) -> None:
        self._watchdog.record_queue_state(queue_state, queue_state_reason)
        super()._notify_queue_state(queue_state, queue_state_reason)

    def _queue_callback(self, observer: Observer) -> QueueCallback | None:
        """What the queue states of one call are reported to, if not to the client's observer."""
        if observer is None:
            return None
        notify = callback_of(observer)

        def on_queue(queue_state: str, queue_state_reason: str | None) -> None:
            self._watchdog.record_queue_state(queue_state, queue_state_reason)
            notify(queue_state, queue_state_reason)

        return on_queue

    async def _result(
        self,
        request: types.SampleRequest,
        accepted: types.UntypedAPIFuture,
        submit_s: float,
        on_queue: QueueCallback | None,
    ) -> types.SampleResponse:
        ids = accepted.sample_sequence_ids
        if ids is None or len(ids) != request.num_samples:
            raise APIResponseValidationError(
                None,
                None,
                f"the server accepted a request for {request.num_samples} samples and returned "
                f"{len(ids or [])} sample_sequence_ids; it is older than protocol 0.36",
            )
        finished_size = 0
        try:
            # A call with its own observer is polled by itself: the poll for all samples returns no queue states.
            if self._completions is not None and on_queue is None:
                finished_size = await self._completions.wait(accepted.request_id)
            response: types.SampleResponse = await self._opened.results.fetch(
                _SAMPLE,
                accepted,
                submit_s=submit_s,
                on_queue=on_queue or self._notify_queue_state,
                client=self._sampling_session_id,
                payload_bytes=finished_size,
            )
            if self._completions is not None:
                self._completions.retrieved(accepted.request_id)
        except asyncio.CancelledError:
            self._session.cancellations.add(accepted.request_id)
            raise
        if request.prompt_alt_tokens_k > 0 and response.prompt_alt_tokens is None:
            raise APIResponseValidationError(
                None, None, "the reply has no prompt_alt_tokens, which were requested"
            )
        note_sampled(response)
        return response

    async def _next_seq_id(self) -> int:
        if self._copy is None:
            async with self._join_lock:
                if self._copy is None:
                    joined: types.JoinSamplingSessionResponse = await self._session.caller.call(
                        endpoint("join_sampling_session"),
                        types.JoinSamplingSessionRequest(sampling_session_id=self._sampling_session_id),
                    )
                    self._copy = joined.client_counter
        return self._copy * SEQ_IDS_PER_COPY + next(self._numbers)

    async def _submit(self, body: bytes, size: int) -> types.UntypedAPIFuture:
        """Submits one sample; after a 429 or 402 the same request is submitted again when the pause is over."""
        send = functools.partial(
            self._session.caller.call, _SAMPLE, body, headers=BACKPRESSURE, policy=self._submit_policy
        )
        accepted: types.UntypedAPIFuture = await submit_paced(self._opened, self._session.caller, send, size)
        return accepted

    async def _logprobs(
        self, request: types.SampleRequest, on_queue: QueueCallback | None
    ) -> list[float | None]:
        logprobs = (await self._sample(request, on_queue)).prompt_logprobs
        if logprobs is None:
            raise APIResponseValidationError(
                None, None, "the reply has no prompt logprobs, which were requested"
            )
        return logprobs

    async def _base_model(self) -> str:
        self._session.check_open()
        caller = self._session.caller
        with trace_operation("get_base_model", on=caller.config.tracing):
            sampler: types.GetSamplerResponse = await caller.call(
                endpoint("get_sampler"), path={"sampler_id": self._sampling_session_id}
            )
        self._known_base_model = sampler.base_model
        return sampler.base_model

    async def _tokenizer(self) -> Tokenizer:
        from tinkex.tokenizers import load_tokenizer

        load = functools.partial(load_tokenizer, tokenizer_id=None, base_model=await self._base_model())
        return await run_in_daemon_thread(load, self._session.caller)


_SAMPLE = endpoint("asample")
