"""The training client: forward and backward passes, optimizer steps and checkpoints of one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

from tinkex import types
from tinkex._runtime import background
from tinkex._wire.endpoints import endpoint
from tinkex.clients._checks import check_data, check_loss, check_name, check_ttl
from tinkex.clients._chunking import split
from tinkex.clients._custom_losses import CustomPass, custom_pass
from tinkex.clients._operations import OperationSubmitter
from tinkex.clients._queue_state import QueueStateMixin
from tinkex.clients._reduction import combine
from tinkex.clients._spans import spanning
from tinkex.clients._twins import async_call, blocking
from tinkex.clients._warnings import warn_caller
from tinkex.clients.sampling import SamplingClient, open_sampling_client
from tinkex.errors import APIResponseValidationError
from tinkex.losses.custom import SURROGATE
from tinkex.observability.tracing import trace_operation
from tinkex.types import Datum

if TYPE_CHECKING:
    from tinkex.clients.sampling import RetryConfig
    from tinkex.clients.session import OpenSession, Session
    from tinkex.futures import APIFuture, AwaitableConcurrentFuture
    from tinkex.losses.custom import CustomLoss
    from tinkex.losses.traced import LossHandle
    from tinkex.observability.telemetry.reporter import Reporter
    from tinkex.tokenizers import Tokenizer

__all__ = ["TrainingClient"]


class TrainingClient(QueueStateMixin):
    """Trains one model: a base model with its own adapter, optimizer state and run id.

    Operations take effect in the order of the calls, whether or not their results are awaited, so that the
    next batch can be submitted while the last one runs::

        backward = client.forward_backward(batch, "cross_entropy")
        step = client.optim_step(tinkex.AdamParams(learning_rate=1e-4))
        print(backward.result().metrics["loss:sum"], step.result().metrics)

    Get one from :meth:`ServiceClient.create_lora_training_client`. Every method has an ``_async`` form.
    """

    def __init__(
        self, session: Session, opened: OpenSession, model_seq_id: int, model_id: types.ModelID
    ) -> None:
        self.model_id = model_id
        self.model_seq_id = model_seq_id
        self._session = session
        self._opened = opened
        self._operations = OperationSubmitter(session, opened, model_id, self._notify_queue_state)

    # ---- passes ----

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Computes the loss and its outputs (such as logprobs) without any gradient."""
        return self._pass(data, loss_fn, loss_fn_config, forward_only=True)

    forward_async = async_call(forward)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Computes the loss and adds its gradient to what the next :meth:`optim_step` applies.

        Gradients of several calls add up. Large data is sent in chunks, and the result is one output. If one
        chunk fails, the gradients of the others may already have been added.
        """
        return self._pass(data, loss_fn, loss_fn_config, forward_only=False)

    forward_backward_async = async_call(forward_backward)

    @spanning("forward_backward_custom")
    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLoss | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
        regularizers: Sequence[types.RegularizerSpec] = (),
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """As :meth:`forward_backward` with a custom loss, written with PyTorch.

        ``loss_fn(data, logprobs)`` receives one tensor per datum, of the shape of its ``target_tokens``, and
        returns the loss and a dictionary of metrics. It is called once, in this process, after a forward pass that this
        call waits for. If it fails, nothing is added to the gradient::

            def squared(data, logprobs):
                return sum((lp**2).sum() for lp in logprobs), {"datums": len(data)}

            client.forward_backward_custom(batch, squared).result().metrics["loss:sum"]

        A ``LossHandle`` from ``ServiceClient.create_custom_loss`` runs on the server, in one pass, if the server supports it.
        ``regularizers`` are added to the loss, each with its weight, and reported as metrics; they run in this process.
        """
        loss = self._custom(data, loss_fn, loss_type_input, regularizers)
        if loss.loss_id is not None:
            return self.forward_backward(data, "custom", {"loss_id": loss.loss_id})
        surrogate = loss.surrogate(data, self.forward(loss.forward_data, SURROGATE).result())
        return self._pass(surrogate.data, SURROGATE, None, forward_only=False, finish=surrogate.finish)

    # Not derived: between its two passes the sync form blocks the caller's thread, and this one awaits on the caller's loop.
    @spanning("forward_backward_custom")
    async def forward_backward_custom_async(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLoss | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
        regularizers: Sequence[types.RegularizerSpec] = (),
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """As :meth:`forward_backward_custom`, awaiting the forward pass; await the future for the output."""
        loss = self._custom(data, loss_fn, loss_type_input, regularizers)
        if loss.loss_id is not None:
            return await self.forward_backward_async(data, "custom", {"loss_id": loss.loss_id})
        surrogate = await loss.surrogate_async(data, await self.forward(loss.forward_data, SURROGATE))
        return self._pass(surrogate.data, SURROGATE, None, forward_only=False, finish=surrogate.finish)

    def optim_step(
        self,
        optim_params: types.AdamParams | Mapping[str, Any] | None = None,
        *,
        adam_params: types.AdamParams | None = None,
    ) -> APIFuture[types.OptimStepResponse]:
        """Applies the accumulated gradient once, with these parameters, and clears it.

        ``optim_params`` is an ``AdamParams``, or for another optimizer a mapping with its ``type``.
        ``adam_params`` is the older spelling of the same argument.
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
        return self._operations.start(
            endpoint("optim_step"),
            lambda seq_id: types.OptimStepRequest(
                model_id=self.model_id, seq_id=seq_id, adam_params=adam, optimizer_params=other
            ),
        )

    optim_step_async = async_call(optim_step)

    # ---- checkpoints ----

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> APIFuture[types.SaveWeightsResponse]:
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
                user_metadata=_copied(user_metadata),
            ),
        )

    save_state_async = async_call(save_state)

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: Sequence[str] | None = None,
    ) -> APIFuture[types.SaveWeightsExternalResponse]:
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
        )

    save_weights_external_async = async_call(save_weights_external)

    def load_state(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        """Replaces this run's weights by saved ones and resets the optimizer."""
        return self._load(path, weights_access_token, optimizer=False)

    load_state_async = async_call(load_state)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        """Replaces this run's weights and optimizer state by saved ones, to continue exactly from there."""
        return self._load(path, weights_access_token, optimizer=True)

    load_state_with_optimizer_async = async_call(load_state_with_optimizer)

    # ---- sampling ----

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> APIFuture[types.SaveWeightsForSamplerResponse]:
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
                user_metadata=_copied(user_metadata),
            ),
            lambda saved: _require(saved, "path", "a named save"),
        )

    save_weights_for_sampler_async = async_call(save_weights_for_sampler)

    @blocking
    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> Future[SamplingClient]:
        """A sampling client on the current weights; further training does not change them."""
        if name is not None:
            warn_caller(
                "save_weights_and_get_sampling_client makes an unnamed snapshot and does not use 'name'; "
                "for a named one call save_weights_for_sampler and create_sampling_client",
                DeprecationWarning,
            )
        sampling_session_seq_id = self._session.next_sampling_session_seq_id()
        saving: AwaitableConcurrentFuture[SamplingClient] = self._operations.start(
            endpoint("save_weights_for_sampler"),
            lambda seq_id: types.SaveWeightsForSamplerRequest(
                model_id=self.model_id, seq_id=seq_id, sampling_session_seq_id=sampling_session_seq_id
            ),
            self._snapshot_sampler(retry_config, record_stability_info),
        )
        return saving.future()

    save_weights_and_get_sampling_client_async = async_call(save_weights_and_get_sampling_client)

    @blocking
    def create_sampling_client(
        self, model_path: str, retry_config: RetryConfig | None = None, record_stability_info: bool = False
    ) -> Future[SamplingClient]:
        """A sampling client on saved weights."""
        return background().submit(
            open_sampling_client(
                self._session,
                model_path=model_path,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )
        )

    create_sampling_client_async = async_call(create_sampling_client)

    def unload(self) -> APIFuture[types.UnloadModelResponse]:
        """Frees the live weights on the server, after all operations called before; checkpoints are kept."""
        return self._operations.start_all(
            endpoint("unload_model"),
            lambda _: [types.UnloadModelRequest(model_id=self.model_id)],
            lambda results: results[0],
            sizes=[0],
            numbered=False,
        )

    unload_async = async_call(unload)

    # ---- properties ----

    @blocking
    def get_info(self) -> Future[types.GetInfoResponse]:
        """The properties of this run: base model, tokenizer, adapter rank."""
        return background().submit(self._info())

    get_info_async = async_call(get_info)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the base model: a ``transformers`` one where that is installed, else our own."""
        from tinkex.tokenizers import load_tokenizer

        model = self.get_info().model_data
        return load_tokenizer(
            self._session.caller, tokenizer_id=model.tokenizer_id, base_model=model.model_name
        )

    def get_console_url(self) -> str:
        """The page of this run in the hosted service's console."""
        return self._session.console_url(f"training_runs/{self.model_id}")

    def get_telemetry(self) -> Reporter | None:
        """The telemetry of this session; None before the session is open, and if telemetry is off."""
        return self._session.telemetry

    @property
    def holder(self) -> Session:
        """The session this run belongs to."""
        return self._session

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
    ) -> APIFuture[types.ForwardBackwardOutput]:
        data = check_data(data)
        config = check_loss(loss_fn, loss_fn_config)
        limits = self._opened.client_config
        chunks = split(
            data, max_datums=limits.fwdbwd_max_chunk_len, max_bytes=limits.fwdbwd_max_chunk_bytes_count
        )
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
        )

    def _load(
        self, path: str, weights_access_token: str | None, *, optimizer: bool
    ) -> APIFuture[types.LoadWeightsResponse]:
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
        )

    def _custom(self, *arguments: Any) -> CustomPass:
        return custom_pass(*arguments, session_id=self._opened.session_id, events=self._session.caller.sink)

    def _snapshot_sampler(
        self, retry_config: RetryConfig | None, record_stability_info: bool
    ) -> Callable[[types.SaveWeightsForSamplerResponse], SamplingClient]:
        def open_sampler(saved: types.SaveWeightsForSamplerResponse) -> SamplingClient:
            sampling_session_id = _require(
                saved, "sampling_session_id", "an unnamed save"
            ).sampling_session_id
            assert sampling_session_id is not None
            return SamplingClient(
                self._session,
                self._opened,
                sampling_session_id=sampling_session_id,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )

        return open_sampler

    async def _info(self) -> types.GetInfoResponse:
        self._session.check_open()
        request = types.GetInfoRequest(model_id=self.model_id)
        with trace_operation("get_info", on=self._session.caller.config.tracing):
            info: types.GetInfoResponse = await self._session.caller.call(endpoint("get_info"), request)
        return info


def _require(
    saved: types.SaveWeightsForSamplerResponse, field: str, what: str
) -> types.SaveWeightsForSamplerResponse:
    if getattr(saved, field) is None:
        raise APIResponseValidationError(None, None, f"the reply to {what} has no {field}")
    return saved


def _copied(metadata: Mapping[str, str] | None) -> dict[str, Any] | None:
    return None if metadata is None else dict(metadata)
