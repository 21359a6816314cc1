"""The service client: the entry point of every program."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast

from tinkex import types
from tinkex._runtime import await_future, background
from tinkex._wire.endpoints import endpoint, operation_of
from tinkex.clients._connection import connect
from tinkex.clients._docstrings import documented
from tinkex.clients._loop_records import check_rollouts_are_stored
from tinkex.clients._open_sampling import open_sampling_client
from tinkex.clients._pending import (
    Pending,
    PendingText,
    PendingValue,
    pending_sampling_client,
    pending_training_client,
)
from tinkex.clients._rest_calls import RestCalls
from tinkex.clients._twins import async_form
from tinkex.clients._warnings import deprecate, warn_about_deprecated_names
from tinkex.clients.rest import RestClient, weights_info
from tinkex.clients.session import FinishStatus, Session
from tinkex.clients.training import TrainingClient
from tinkex.errors import ClosedError, TinkexError
from tinkex.observability.tracing import trace_operation

if TYPE_CHECKING:
    from tinkex._transport.base import Transport
    from tinkex._wire.endpoints import Endpoint
    from tinkex.clients._pending import (
        PendingCapabilities,
        PendingRestClient,
        PendingSamplingClient,
        PendingTrainingClient,
    )
    from tinkex.clients.sampling import RetryConfig
    from tinkex.config import Config, ConfigOptions
    from tinkex.futures import AwaitableConcurrentFuture
    from tinkex.losses.traced import LossHandle, PerDatumLossFn
    from tinkex.observability.events import Sink
    from tinkex.observability.telemetry.reporter import Reporter

__all__ = ["ServiceClient"]

T = TypeVar("T")


@documented("service")
class ServiceClient:
    """Opens training and sampling clients on a server, or on the engine in this process.

    ::

        with tinkex.ServiceClient(base_url="local") as service:
            training = service.create_lora_training_client("HuggingFaceTB/SmolLM2-135M-Instruct", rank=8)

    The constructor sends nothing: the session is opened at first use. Leaving the ``with`` block, or :meth:`close`,
    ends it. Every setting can be given as an argument, such as ``timeout=30``; those that are not given come from the
    environment. ``config`` replaces them all. ``transport`` and ``events`` are for tests and tools: what sends the requests, and
    what receives their events. With ``lazy``, methods that create clients return immediately also where no event loop
    runs, so that several clients are created concurrently; errors are then raised by ``result()`` or at the first use.
    """

    def __init__(
        self,
        user_metadata: Mapping[str, Any] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        config: Config | None = None,
        transport: Transport | None = None,
        events: Sink | None = None,
        lazy: bool = False,
        **settings: Unpack[ConfigOptions],
    ) -> None:
        if default_headers_overrides is not None:
            if "default_headers" in settings:
                raise TypeError(
                    "default_headers and default_headers_overrides are the same; give one of them"
                )
            settings["default_headers"] = default_headers_overrides
        self._caller = connect(
            config=config,
            transport=transport,
            events=events,
            user_metadata=user_metadata,
            project_id=project_id,
            base_url=base_url,
            api_key=api_key,
            **settings,
        )
        self._session = Session(self._caller, display_name=display_name, lazy=lazy)
        self._closing: AwaitableConcurrentFuture[None] | None = None
        self._close_lock = threading.Lock()
        warn_about_deprecated_names(self, self.config)

    # ---- training ----

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
        optimizer: Mapping[str, Any] | types.AdamOptimizerConfig | None = None,
    ) -> PendingTrainingClient:
        """A new run: a base model with a fresh low-rank adapter to train."""
        lora = _lora(rank, seed, train_mlp, train_attn, train_unembed)
        return self._training_client(self._create(base_model, lora, user_metadata, _optimizer(optimizer)))

    create_lora_training_client_async = async_form(create_lora_training_client)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: Mapping[str, Any] | types.AdamOptimizerConfig | None = None,
    ) -> PendingTrainingClient:
        """A new run that starts from saved weights, with a fresh optimizer."""
        return self._training_client(
            self._restore(
                path,
                base_model,
                user_metadata,
                weights_access_token,
                _optimizer(optimizer),
                with_optimizer=False,
            )
        )

    create_training_client_from_state_async = async_form(create_training_client_from_state)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> PendingTrainingClient:
        """A new run that continues a saved one exactly: with its weights and optimizer state."""
        return self._training_client(
            self._restore(
                path, base_model, user_metadata, weights_access_token, _optimizer(None), with_optimizer=True
            )
        )

    create_training_client_from_state_with_optimizer_async = async_form(
        create_training_client_from_state_with_optimizer
    )

    # ---- sampling and the rest ----

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> PendingSamplingClient:
        """A sampling client on saved weights (``tinker://…``) or on a base model."""
        opening = open_sampling_client(
            self._session,
            model_path=model_path,
            base_model=base_model,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )
        return pending_sampling_client(opening, lazy=self._session.lazy)

    create_sampling_client_async = async_form(create_sampling_client)

    @deprecate("use RestClient(), which needs no ServiceClient")
    def create_rest_client(self) -> PendingRestClient:
        """A REST client on the same server and connections."""
        self._session.check_open()
        return cast("PendingRestClient", Pending.of(RestClient(caller=self._caller)))

    @deprecate("use RestClient().get_server_capabilities()")
    def get_server_capabilities(self) -> PendingCapabilities:
        """The base models that the server offers; as :meth:`RestClient.get_server_capabilities`."""
        return cast(
            "PendingCapabilities", PendingValue(types.GetServerCapabilitiesResponse, self._capabilities())
        )

    get_server_capabilities_async = async_form(get_server_capabilities)

    def copy_weights(
        self, path: str, *, ttl_seconds: int | None = None, weights_access_token: str | None = None
    ) -> AwaitableConcurrentFuture[str]:
        """Copies a checkpoint into this client's project; the result is the path of the copy."""
        self._session.check_open()
        project_id = self._caller.config.project_id
        if project_id is None:
            raise ValueError(
                "copy_weights copies into this client's project; make it with ServiceClient(project_id=…)"
            )
        copying = RestCalls(self._caller).copy_weights(path, project_id, ttl_seconds, weights_access_token)
        return background().submit(copying)

    def create_custom_loss(
        self, fn: PerDatumLossFn, input_ranks: Mapping[str, types.CustomLossInputRank]
    ) -> AwaitableConcurrentFuture[LossHandle]:
        """A custom loss as a graph that the server runs; a server without support for it runs it in this process.

        ``fn(logprobs, …)`` is traced once and applied to each datum: after ``logprobs`` its parameters name
        ``loss_fn_inputs``, and ``input_ranks`` gives the number of dimensions of each. It returns a scalar loss
        and metrics named ``custom/<name>:sum`` or ``:mean``, all tensors, computed with torch and math only::

            def neg_ll(logprobs, weights):
                loss = -(logprobs * weights).sum()
                return loss, {"custom/neg_ll:sum": loss}

            handle = service.create_custom_loss(neg_ll, {"logprobs": 1, "weights": 1}).result()
            training.forward_backward_custom(data, handle).result()

        A session creates each loss once; keep its handle.
        """
        from tinkex.losses.traced import trace_loss

        self._session.check_open()
        return background().submit(self._custom_loss(trace_loss(fn, input_ranks)))

    def poll(self, request_id: str, result_type: type[T] | None = None) -> AwaitableConcurrentFuture[T]:
        """The result of an operation that is known only by its id, such as one that another process submitted.

        ``result_type`` is the type of the result, such as ``types.OptimStepResponse`` or
        ``types.ForwardBackwardOutput``; without it the result is a dictionary, as the server sends it::

            saved = service.poll(request_id, types.SaveWeightsResponse).result()

        Raises what the operation itself would raise. The server keeps results for a limited time.
        """
        self._session.check_open()
        return background().submit(self._poll(request_id, operation_of(result_type)))

    poll_async = async_form(poll)

    @property
    def config(self) -> Config:
        """The settings of this client; its ``repr`` shows no secrets."""
        return self._caller.config

    def get_console_url(self) -> PendingText:
        """The page of this session in the hosted service's console."""
        return PendingText(self._session.console_url())

    def get_telemetry(self) -> Reporter | None:
        """The telemetry of this session; None before the session is open, and if telemetry is off."""
        return self._session.telemetry

    @property
    def holder(self) -> Session:
        """The session, opened if necessary; for programs written for older SDKs."""
        background().run(self._session.opened())
        return self._session

    @holder.setter
    def holder(self, session: Session) -> None:
        self._session = session

    def renew_session(self) -> bool:
        """Opens a new session if the server has deleted or ended this one; returns whether it did.

        Clients of the old session stay bound to it: create new ones, from checkpoints. Programs that use
        ``resilient_training`` or a recovery monitor need not call it.
        """
        return background().run(self._session.renew_if_lost())

    async def renew_session_async(self) -> bool:
        """As :meth:`renew_session`, without blocking."""
        return await await_future(background().submit(self._session.renew_if_lost()), propagate_cancel=True)

    # ---- closing ----

    def close(self, status: FinishStatus, detail: str | None = None) -> AwaitableConcurrentFuture[None]:
        """Ends the session with the outcome of the program; later calls raise ``ClosedError``.

        Operations in flight raise ``ClosedError`` too, so collect their results first. Closing again
        returns the same future.
        """
        if status not in {"success", "errored", "interrupted"}:
            raise ValueError(f"status is 'success', 'errored' or 'interrupted', got {status!r}")
        with self._close_lock:
            if self._closing is None:
                self._closing = background().submit(self._session.finish(status, detail))
            return self._closing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(*_ending(error)).result()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(*_ending(error))

    def __repr__(self) -> str:
        return f"ServiceClient(base_url={self._caller.config.base_url!r})"

    # ---- the calls ----

    def _training_client(self, creating: Coroutine[Any, Any, TrainingClient]) -> PendingTrainingClient:
        return pending_training_client(creating, lazy=self._session.lazy)

    async def _create(
        self,
        base_model: str,
        lora: types.LoraConfig,
        user_metadata: Mapping[str, str] | None,
        optimizer: dict[str, Any],
    ) -> TrainingClient:
        with trace_operation("create_lora_training_client", on=self._caller.config.tracing) as operation:
            opened = await self._session.opened()
            if self._caller.config.log_rollouts:
                check_rollouts_are_stored(opened)
            create = endpoint("create_model")
            model_seq_id = self._session.next_model_seq_id()
            accepted: types.UntypedAPIFuture = await self._caller.call(
                create,
                types.CreateModelRequest(
                    session_id=opened.session_id,
                    model_seq_id=model_seq_id,
                    base_model=base_model,
                    user_metadata=None if user_metadata is None else dict(user_metadata),
                    lora_config=lora,
                    optimizer_config=optimizer,
                ),
            )
            created: types.CreateModelResponse = await opened.results.fetch(create, accepted)
            if operation is not None:
                facts = {"session.id": opened.session_id, "gen_ai.request.model": base_model}
                operation.set_attributes(
                    {**facts, "tinkex.model_id": created.model_id, "tinkex.lora_rank": lora.rank}
                )
        return TrainingClient(self._session, opened, model_seq_id, created.model_id)

    async def _restore(
        self,
        path: str,
        base_model: str | None,
        user_metadata: Mapping[str, str] | None,
        weights_access_token: str | None,
        optimizer: dict[str, Any],
        *,
        with_optimizer: bool,
    ) -> TrainingClient:
        self._session.check_open()
        name = f"create_training_client_from_state{'_with_optimizer' if with_optimizer else ''}"
        with trace_operation(name, on=self._caller.config.tracing):
            return await self._restore_now(
                path,
                base_model,
                user_metadata,
                weights_access_token,
                optimizer,
                with_optimizer=with_optimizer,
            )

    async def _restore_now(
        self,
        path: str,
        base_model: str | None,
        user_metadata: Mapping[str, str] | None,
        weights_access_token: str | None,
        optimizer: dict[str, Any],
        *,
        with_optimizer: bool,
    ) -> TrainingClient:
        info = await weights_info(self._caller, path)
        if not info.is_lora or info.lora_rank is None:
            raise ValueError(f"{path} has no LoRA weights, so no training run can start from it")
        lora = types.LoraConfig(
            rank=info.lora_rank,
            train_mlp=info.train_mlp is not False,
            train_attn=info.train_attn is not False,
            train_unembed=info.train_unembed is not False,
        )
        if with_optimizer:
            optimizer = dict(info.optimizer_config)
        client = await self._create(base_model or info.base_model, lora, user_metadata, optimizer)
        load = client.load_state_with_optimizer if with_optimizer else client.load_state
        try:
            await load(path, weights_access_token)
        except TinkexError:
            with contextlib.suppress(ClosedError):
                client.unload()  # a run without its weights is useless; the server need not keep it
            raise
        return client

    async def _poll(self, request_id: str, operation: Endpoint) -> Any:
        with trace_operation("poll", on=self._caller.config.tracing):
            opened = await self._session.opened()
            return await opened.results.fetch(operation, types.UntypedAPIFuture(request_id=request_id))

    async def _custom_loss(self, traced: LossHandle) -> LossHandle:
        with trace_operation("create_custom_loss", on=self._caller.config.tracing):
            return await self._session.custom_losses.create(await self._session.opened(), traced)

    async def _capabilities(self) -> types.GetServerCapabilitiesResponse:
        self._session.check_open()
        call = endpoint("get_server_capabilities")
        with trace_operation(call.name, on=self._caller.config.tracing):
            found: types.GetServerCapabilitiesResponse = await self._caller.call(call)
        return found


def _lora(
    rank: int, seed: int | None, train_mlp: bool, train_attn: bool, train_unembed: bool
) -> types.LoraConfig:
    return types.LoraConfig(
        rank=rank, seed=seed, train_mlp=train_mlp, train_attn=train_attn, train_unembed=train_unembed
    )


def _optimizer(optimizer: Mapping[str, Any] | types.AdamOptimizerConfig | None) -> dict[str, Any]:
    if optimizer is None:
        return {"type": "adamw"}
    config = optimizer.model_dump() if isinstance(optimizer, types.AdamOptimizerConfig) else dict(optimizer)
    if not isinstance(config.get("type"), str):
        raise ValueError("the optimizer needs a 'type', such as {'type': 'adamw'}")
    return config


def _ending(error: BaseException | None) -> tuple[FinishStatus, str | None]:
    """The outcome of a ``with`` block; without the error's message, which may quote the user's data."""
    if error is None:
        return "success", None
    return "errored" if isinstance(error, Exception) else "interrupted", type(error).__name__
