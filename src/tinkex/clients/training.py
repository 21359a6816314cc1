"""The training client: forward and backward passes, optimizer steps and checkpoints of one run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from tinkex import types
from tinkex._runtime import on_event_loop, run_in_daemon_thread
from tinkex._wire.endpoints import endpoint
from tinkex.clients._checks import check_data, check_loss, check_name, check_ttl
from tinkex.clients._chunking import split
from tinkex.clients._custom_losses import CustomPass, custom_pass
from tinkex.clients._docstrings import documented
from tinkex.clients._loop_records import LoopReportMethods
from tinkex.clients._open_sampling import open_sampling_client, open_saved_sampler, unnamed_save
from tinkex.clients._operations import OperationSubmitter, named_export, named_save
from tinkex.clients._pending import PendingText, PendingValue, pending_sampling_client, pending_value
from tinkex.clients._queue_state import QueueStateMixin, given
from tinkex.clients._reduction import combine
from tinkex.clients._spans import spanning
from tinkex.clients._twins import async_form
from tinkex.clients._warnings import deprecate_async, warn_about_deprecated_names, warn_caller
from tinkex.losses.custom import SURROGATE
from tinkex.observability.tracing import trace_operation
from tinkex.types import Datum

if TYPE_CHECKING:
    from tinkex.clients._pending import PendingInfo, PendingSamplingClient, PendingTokenizer
    from tinkex.clients._queue_state import Observer
    from tinkex.clients.sampling import RetryConfig
    from tinkex.clients.session import OpenSession, Session
    from tinkex.config import Config
    from tinkex.futures import AwaitableConcurrentFuture
    from tinkex.losses.custom import CustomLoss, Surrogate
    from tinkex.losses.traced import LossHandle
    from tinkex.observability.telemetry.reporter import Reporter
    from tinkex.tokenizers import Tokenizer

__all__ = ["TrainingClient"]


@documented("client")
class TrainingClient(QueueStateMixin, LoopReportMethods):
    """Trains one model: a base model with its own adapter, optimizer state and run id.

    Operations take effect in the order of the calls, whether or not their results are awaited, so that the
    next batch can be submitted while the last one runs::

        backward = client.forward_backward(batch, "cross_entropy")
        step = client.optim_step(tinkex.AdamParams(learning_rate=1e-4))
        print(backward.result().metrics["loss:sum"], step.result().metrics)

    Get one from :meth:`ServiceClient.create_lora_training_client`. Every method can be awaited.
    """

    def __init__(
        self, session: Session, opened: OpenSession, model_seq_id: int, model_id: types.ModelID
    ) -> None:
        self.model_id = model_id
        self.model_seq_id = model_seq_id
        self._session = session
        self._opened = opened
        self._known_info: types.GetInfoResponse | None = None
        self._operations = OperationSubmitter(session, opened, model_id, self._notify_queue_state)
        self._start_reports(logs_passes=self.config.log_rollouts)
        warn_about_deprecated_names(self, self.config)

    # ---- passes ----

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        queue_state_observer: Observer = None,
    ) -> AwaitableConcurrentFuture[types.ForwardBackwardOutput]:
        """Computes the loss and its outputs (such as logprobs) without any gradient.

        The arguments are those of :meth:`forward_backward`::

            outputs = client.forward(batch, "cross_entropy").result().loss_fn_outputs

        ``queue_state_observer`` is notified of the queue states of this call, instead of the client's observer; so it is in
        every other operation but ``unload``.
        """
        return self._pass(data, loss_fn, loss_fn_config, forward_only=True, observer=queue_state_observer)

    forward_async = async_form(forward, returns_future=True)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        queue_state_observer: Observer = None,
    ) -> AwaitableConcurrentFuture[types.ForwardBackwardOutput]:
        """Computes the loss and adds its gradient to what the next :meth:`optim_step` applies.

        Each datum has the model's input and the inputs of the loss, such as ``target_tokens``. The losses are
        ``cross_entropy``, ``importance_sampling``, ``ppo``, ``cispo``, ``dro``, ``gspo`` and ``stable_reinforce``. Gradients of
        several calls add up. Large data is sent in chunks, and the result is one output. If one chunk fails, the gradients of the
        others may already have been added::

            inputs, targets = types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]}
            output = client.forward_backward([types.Datum(inputs, targets)], "cross_entropy").result()
            client.optim_step(types.AdamParams(learning_rate=1e-4)).result()
            print(output.metrics["loss:sum"])
        """
        return self._pass(data, loss_fn, loss_fn_config, forward_only=False, observer=queue_state_observer)

    forward_backward_async = async_form(forward_backward, returns_future=True)

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLoss | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
        regularizers: Sequence[types.RegularizerSpec] = (),
        queue_state_observer: Observer = None,
    ) -> AwaitableConcurrentFuture[types.ForwardBackwardOutput]:
        """As :meth:`forward_backward` with a custom loss, written with PyTorch.

        ``loss_fn(data, logprobs)`` receives one tensor per datum, of the shape of its ``target_tokens``, and
        returns the loss and a dictionary of metrics. It is called once, in this process, after a forward pass that this
        call waits for; on an event loop nothing waits, and it is called on another thread. If it fails, nothing is added to
        the gradient::

            def squared(data, logprobs):
                return sum((lp**2).sum() for lp in logprobs), {"datums": len(data)}

            client.forward_backward_custom(batch, squared).result().metrics["loss:sum"]

        A ``LossHandle`` from ``ServiceClient.create_custom_loss`` runs on the server, in one pass, if the server supports it.
        ``regularizers`` are added to the loss, each with its weight, and reported as metrics; they run in this process.
        """
        loss = self._custom(data, loss_fn, loss_type_input, regularizers)
        if loss.loss_id is not None:
            observed = given(queue_state_observer)
            return self.forward_backward(data, "custom", {"loss_id": loss.loss_id}, **observed)
        if on_event_loop():
            return self._operations.hold(lambda: self._custom_pass_async(data, loss, queue_state_observer))
        return self._custom_pass(data, loss, queue_state_observer)

    # Not derived: its first await is that of the forward pass, and the loss is called on the caller's thread.
    @deprecate_async
    @spanning("forward_backward_custom")
    async def forward_backward_custom_async(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLoss | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
        regularizers: Sequence[types.RegularizerSpec] = (),
        queue_state_observer: Observer = None,
    ) -> AwaitableConcurrentFuture[types.ForwardBackwardOutput]:
        """Deprecated: as :meth:`forward_backward_custom`, awaiting the forward pass; await the future for the output."""
        loss = self._custom(data, loss_fn, loss_type_input, regularizers)
        observed = given(queue_state_observer)
        if loss.loss_id is not None:
            return self.forward_backward(data, "custom", {"loss_id": loss.loss_id}, **observed)
        forward = self.forward(loss.forward_data, SURROGATE, **observed)
        return self._surrogate_pass(await loss.surrogate_async(data, await forward), queue_state_observer)

    def optim_step(
        self,
        optim_params: types.AdamParams | Mapping[str, Any] | None = None,
        *,
        adam_params: types.AdamParams | None = None,
        queue_state_observer: Observer = None,
    ) -> AwaitableConcurrentFuture[types.OptimStepResponse]:
        """Applies the accumulated gradient once, with these parameters, and clears it.

        ``optim_params`` is an ``AdamParams``, or for another optimizer a mapping with its ``type``.
        ``adam_params`` is the older spelling of the same argument: ``optim_step(types.AdamParams(learning_rate=1e-4))``.
        """
        if optim_params is not None and adam_params is not None:
            raise ValueError("optim_step takes its parameters once: optim_step(AdamParams(learning_rate=…))")
        params = optim_params if optim_params is not None else adam_params
        adam, other = None, None
        if isinstance(params, types.AdamParams):
            adam = params
        elif isinstance(params, Mapping) and isinstance(params.get("type"), str):
            other = dict(params)
        else:
            raise TypeError(
                f"optim_step takes AdamParams, or a mapping with the optimizer's 'type', not {type(params).__name__}"
            )
        self._count_step()
        return self._operations.start(
            endpoint("optim_step"),
            lambda seq_id: types.OptimStepRequest(
                model_id=self.model_id, seq_id=seq_id, adam_params=adam, optimizer_params=other
            ),
            observer=queue_state_observer,
        )

    optim_step_async = async_form(optim_step, returns_future=True)

    # ---- checkpoints ----

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
        *,
        queue_state_observer: Observer = None,
    ) -> AwaitableConcurrentFuture[types.SaveWeightsResponse]:
        """Saves weights and optimizer state under a name; load them again by the result's ``path``."""
        check_name(name)
        check_ttl(ttl_seconds)
        return self._operations.start(
            endpoint("save_weights"),
            lambda seq_id: types.SaveWeightsRequest(
                model_id=self.model_id,
                path=name,
                seq_id=seq_id,
                ttl_seconds=ttl_seconds,
                overwrite=overwrite,
                user_metadata=None if user_metadata is None else dict(user_metadata),
            ),
            observer=queue_state_observer,
        )

    save_state_async = async_form(save_state, returns_future=True)

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: Sequence[str] | None = None,
        *,
        queue_state_observer: Observer = None,
    ) -> AwaitableConcurrentFuture[types.SaveWeightsExternalResponse]:
        """Saves weights for use outside the service, encrypted for ``age_encryption_recipients`` if given."""
        check_name(name)
        check_ttl(ttl_seconds)
        return self._operations.start(
            endpoint("save_weights_external"),
            lambda seq_id: types.SaveWeightsExternalRequest(
                model_id=self.model_id,
                path=name,
                seq_id=seq_id,
                ttl_seconds=ttl_seconds,
                age_encryption_recipients=None
                if age_encryption_recipients is None
                else list(age_encryption_recipients),
            ),
            named_export,
            observer=queue_state_observer,
        )

    save_weights_external_async = async_form(save_weights_external, returns_future=True)

    def load_state(
        self, path: str, weights_access_token: str | None = None, *, queue_state_observer: Observer = None
    ) -> AwaitableConcurrentFuture[types.LoadWeightsResponse]:
        """Replaces this run's weights by saved ones and resets the optimizer."""
        return self._load(path, weights_access_token, queue_state_observer, optimizer=False)

    load_state_async = async_form(load_state, returns_future=True)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None, *, queue_state_observer: Observer = None
    ) -> AwaitableConcurrentFuture[types.LoadWeightsResponse]:
        """Replaces this run's weights and optimizer state by saved ones, to continue exactly from there."""
        return self._load(path, weights_access_token, queue_state_observer, optimizer=True)

    load_state_with_optimizer_async = async_form(load_state_with_optimizer, returns_future=True)

    # ---- sampling ----

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
        *,
        queue_state_observer: Observer = None,
    ) -> AwaitableConcurrentFuture[types.SaveWeightsForSamplerResponse]:
        """Saves weights for sampling under a name; sample from the result's ``path``."""
        check_name(name)
        check_ttl(ttl_seconds)
        return self._operations.start(
            endpoint("save_weights_for_sampler"),
            lambda seq_id: types.SaveWeightsForSamplerRequest(
                model_id=self.model_id,
                path=name,
                seq_id=seq_id,
                ttl_seconds=ttl_seconds,
                user_metadata=None if user_metadata is None else dict(user_metadata),
            ),
            named_save,
            observer=queue_state_observer,
        )

    save_weights_for_sampler_async = async_form(save_weights_for_sampler, returns_future=True)

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        kind: types.SamplingClientKind = "snapshot",
    ) -> PendingSamplingClient:
        """A sampling client on the current weights; further training does not change them.

        With ``kind="inflight"`` all such clients of this run share one set of weights: every inflight save replaces them for
        those that exist, too, and samples that start afterwards use them.
        """
        if name is not None:
            warn_caller(
                "save_weights_and_get_sampling_client makes an unnamed snapshot and does not use 'name'; "
                "for a named one call save_weights_for_sampler and create_sampling_client",
                DeprecationWarning,
            )
        saving = self._operations.start(
            endpoint("save_weights_for_sampler"),
            unnamed_save(self._session, self.model_id, kind),
            lambda saved: open_saved_sampler(
                self._session, self._opened, saved, retry_config, record_stability_info=record_stability_info
            ),
        )
        return pending_sampling_client(saving, lazy=self._session.lazy)

    save_weights_and_get_sampling_client_async = async_form(save_weights_and_get_sampling_client)

    def create_sampling_client(
        self, model_path: str, retry_config: RetryConfig | None = None, record_stability_info: bool = False
    ) -> PendingSamplingClient:
        """A sampling client on saved weights."""
        opening = open_sampling_client(
            self._session,
            model_path=model_path,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )
        return pending_sampling_client(opening, lazy=self._session.lazy)

    create_sampling_client_async = async_form(create_sampling_client)

    def unload(self) -> AwaitableConcurrentFuture[types.UnloadModelResponse]:
        """Frees the live weights on the server, after all operations called before; checkpoints are kept."""
        return self._operations.start_all(
            endpoint("unload_model"),
            lambda _: [types.UnloadModelRequest(model_id=self.model_id)],
            lambda results: results[0],
            sizes=[0],
            numbered=False,
        )

    # Not a coroutine function: programs list those of this class, and the official one has no such method.
    @deprecate_async
    def unload_async(self) -> Coroutine[Any, Any, AwaitableConcurrentFuture[types.UnloadModelResponse]]:
        """Deprecated: as :meth:`unload`; await the returned future for the result."""
        return _unload_async(self)

    # ---- properties ----

    def get_info(self) -> PendingInfo:
        """The properties of this run: base model, tokenizer, adapter rank. A client that was created on an event loop has them."""
        return cast("PendingInfo", pending_value(types.GetInfoResponse, self._known_info, self._info))

    get_info_async = async_form(get_info)

    def get_tokenizer(self) -> PendingTokenizer:
        """The tokenizer of the base model: a ``transformers`` one where that is installed, else our own."""
        return cast("PendingTokenizer", PendingValue(None, self._tokenizer()))

    def get_console_url(self) -> PendingText:
        """The page of this run in the hosted service's console."""
        return PendingText(self._session.console_url(f"training_runs/{self.model_id}"))

    def get_telemetry(self) -> Reporter | None:
        """The telemetry of this session; None before the session is open, and if telemetry is off."""
        return self._session.telemetry

    @property
    def config(self) -> Config:
        """The settings of this client; its ``repr`` shows no secrets."""
        return self._session.caller.config

    @property
    def holder(self) -> Session:
        """The session this run belongs to."""
        return self._session

    @holder.setter
    def holder(self, session: Session) -> None:
        self._session = session

    def __repr__(self) -> str:
        return f"TrainingClient(model_id={self.model_id!r})"

    # ---- submission ----

    def _pass(
        self,
        data: Sequence[Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None,
        *,
        forward_only: bool,
        finish: Callable[[types.ForwardBackwardOutput], types.ForwardBackwardOutput] | None = None,
        observer: Observer = None,
    ) -> AwaitableConcurrentFuture[types.ForwardBackwardOutput]:
        data = check_data(data)
        config = check_loss(loss_fn, loss_fn_config)
        limits = self._opened.client_config
        chunks = split(
            data, max_datums=limits.fwdbwd_max_chunk_len, max_bytes=limits.fwdbwd_max_chunk_bytes_count
        )
        self._log_pass([] if forward_only or finish else data)  # the data of a surrogate is no answer
        return self._operations.start_all(
            endpoint("forward_backward"),
            lambda seq_ids: [
                types.ForwardBackwardRequest(
                    model_id=self.model_id,
                    seq_id=seq_id,
                    data=chunk.data,
                    loss_fn=loss_fn,
                    loss_fn_config=config,
                    forward_only=forward_only,
                )
                for seq_id, chunk in zip(seq_ids, chunks, strict=True)
            ],
            combine if finish is None else lambda outputs: finish(combine(outputs)),
            sizes=[chunk.num_bytes for chunk in chunks],
            request_type="Forward" if forward_only else None,
            observer=observer,
        )

    @spanning("forward_backward_custom")
    def _custom_pass(
        self, data: Sequence[Datum], loss: CustomPass, observer: Observer
    ) -> AwaitableConcurrentFuture[types.ForwardBackwardOutput]:
        forward = self.forward(loss.forward_data, SURROGATE, **given(observer))
        return self._surrogate_pass(loss.surrogate_blocking(data, forward.result()), observer)

    @spanning("forward_backward_custom")
    async def _custom_pass_async(
        self, data: Sequence[Datum], loss: CustomPass, observer: Observer
    ) -> AwaitableConcurrentFuture[types.ForwardBackwardOutput]:
        forward = self.forward(loss.forward_data, SURROGATE, **given(observer))
        return self._surrogate_pass(await run_in_daemon_thread(loss.surrogate, data, await forward), observer)

    def _surrogate_pass(
        self, surrogate: Surrogate, observer: Observer
    ) -> AwaitableConcurrentFuture[types.ForwardBackwardOutput]:
        return self._pass(
            surrogate.data,
            SURROGATE,
            None,
            forward_only=False,
            finish=surrogate.finish,
            observer=observer,
        )

    def _load(
        self, path: str, weights_access_token: str | None, observer: Observer, *, optimizer: bool
    ) -> AwaitableConcurrentFuture[types.LoadWeightsResponse]:
        types.ParsedCheckpointTinkerPath.from_tinker_path(path)
        return self._operations.start(
            endpoint("load_weights"),
            lambda seq_id: types.LoadWeightsRequest(
                model_id=self.model_id,
                seq_id=seq_id,
                path=path,
                optimizer=optimizer,
                weights_access_token=weights_access_token,
            ),
            observer=observer,
        )

    def _custom(self, *arguments: Any) -> CustomPass:
        return custom_pass(*arguments, session_id=self._opened.session_id, events=self._session.caller.sink)

    async def _info(self) -> types.GetInfoResponse:
        self._session.check_open()
        request = types.GetInfoRequest(model_id=self.model_id)
        with trace_operation("get_info", on=self._session.caller.config.tracing):
            info: types.GetInfoResponse = await self._session.caller.call(endpoint("get_info"), request)
        self._known_info = info
        return info

    async def _tokenizer(self) -> Tokenizer:
        from tinkex.tokenizers import load_tokenizer

        model = (await self._info()).model_data
        load = functools.partial(load_tokenizer, tokenizer_id=model.tokenizer_id, base_model=model.model_name)
        return await run_in_daemon_thread(load, self._session.caller)


_unload_async = async_form(TrainingClient.unload, returns_future=True)
