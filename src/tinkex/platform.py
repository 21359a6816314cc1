"""The training-platform interface for other frameworks: four calls, on any backend.

A framework that trains through :class:`TrainingPlatform` runs on every implementation: on :class:`TinkexPlatform`,
which is the Tinker API (the hosted service, your own server, or the embedded engine), or on a third-party backend.
The protocol is structural: a backend needs no base class.

::

    def train(platform: TrainingPlatform, model: str, batches: Iterable[Sequence[types.Datum]]) -> str:
        session = platform.create_session(model).result()
        for batch in batches:
            platform.forward_backward(session, batch)
            platform.optim_step(session, types.AdamParams(learning_rate=1e-4))
        return platform.save_checkpoint(session, "final").result()
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

from tinkex import types
from tinkex._runtime import background
from tinkex.errors import APIResponseValidationError

if TYPE_CHECKING:
    from tinkex.clients.service import ServiceClient
    from tinkex.clients.training import TrainingClient

__all__ = ["Deferred", "Done", "PassResult", "PlatformSession", "TinkexPlatform", "TrainingPlatform"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Deferred(Protocol[T_co]):
    """A pending value: ``.result()`` waits for it, and so does ``await``."""

    def result(self, timeout: float | None = None) -> T_co:
        """Returns the value; waits up to ``timeout`` seconds, without limit by default."""
        ...

    def __await__(self) -> Generator[Any, None, T_co]:
        """Returns the value to callers with an event loop."""
        ...


@dataclass(frozen=True)
class Done(Generic[T]):
    """A completed :class:`Deferred`, for backends that compute synchronously.

    >>> Done(3).result()
    3
    """

    value: T

    def result(self, timeout: float | None = None) -> T:  # noqa: ARG002 - part of the protocol
        """Returns the value."""
        return self.value

    async def _value(self) -> T:
        return self.value

    def __await__(self) -> Generator[Any, None, T]:
        return self._value().__await__()


@dataclass(frozen=True)
class PlatformSession:
    """One model in training, identified by its platform's id."""

    session_id: str
    model: str


@dataclass(frozen=True)
class PassResult:
    """The result of a pass: the summed loss, metrics, and the logprobs of each datum's targets."""

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    logprobs: Sequence[Any] = ()
    """One array per datum, of the shape of its ``target_tokens``; empty if the loss returns none."""


@runtime_checkable
class TrainingPlatform(Protocol):
    """The interface of a training backend. Calls on one session take effect in the order they are made."""

    def create_session(
        self, model: str, options: Mapping[str, Any] | None = None
    ) -> Deferred[PlatformSession]:
        """Loads a model for training; raises an error for an option that the backend does not support."""
        ...

    def forward_backward(
        self,
        session: PlatformSession,
        data: Sequence[types.Datum],
        loss_fn: types.LossFnType = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Deferred[PassResult]:
        """Computes a loss and accumulates its gradient for the next step."""
        ...

    def optim_step(
        self, session: PlatformSession, optim_params: types.AdamParams
    ) -> Deferred[Mapping[str, float]]:
        """Applies the accumulated gradient; the result is the step's metrics."""
        ...

    def save_checkpoint(self, session: PlatformSession, name: str) -> Deferred[str]:
        """Saves weights and optimizer state; the result is the checkpoint's path on the backend."""
        ...


class TinkexPlatform:
    """The Tinker API as a training platform.

    ::

        with tinkex.ServiceClient(base_url="local") as service:
            platform = tinkex.platform.TinkexPlatform(service)
            session = platform.create_session("HuggingFaceTB/SmolLM2-135M-Instruct", {"rank": 8}).result()

    The options of ``create_session`` are those of ``create_lora_training_client``, or ``{"checkpoint": path}`` to
    resume from a checkpoint.
    """

    def __init__(self, service: ServiceClient) -> None:
        self._service = service
        self._runs: dict[str, TrainingClient] = {}

    def create_session(
        self, model: str, options: Mapping[str, Any] | None = None
    ) -> Deferred[PlatformSession]:
        """Creates a run on a base model, or one that resumes from a checkpoint."""
        chosen = dict(options or {})
        checkpoint = chosen.pop("checkpoint", None)
        if checkpoint is not None and chosen:
            raise ValueError(f"a checkpoint has its own settings; {min(chosen)!r} cannot be combined with it")

        async def create() -> PlatformSession:
            if checkpoint is not None:
                make = self._service.create_training_client_from_state_with_optimizer_async
                training = await make(checkpoint, base_model=model)
            else:
                training = await self._service.create_lora_training_client_async(model, **chosen)
            self._runs[training.model_id] = training
            return PlatformSession(training.model_id, model)

        return background().submit(create())

    def forward_backward(
        self,
        session: PlatformSession,
        data: Sequence[types.Datum],
        loss_fn: types.LossFnType = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Deferred[PassResult]:
        """Submits the pass and returns immediately."""
        future = self.training(session).forward_backward(data, loss_fn, loss_fn_config)

        async def result() -> PassResult:
            output = await future
            logprobs = [one["logprobs"].to_numpy() for one in output.loss_fn_outputs if "logprobs" in one]
            loss = output.metrics.get("loss:sum")
            if loss is None:
                raise APIResponseValidationError(
                    None,
                    None,
                    f"the server returned no loss:sum, only {sorted(output.metrics)}; use training(session) to read them",
                )
            return PassResult(loss, output.metrics, logprobs)

        return background().submit(result())

    def optim_step(
        self, session: PlatformSession, optim_params: types.AdamParams
    ) -> Deferred[Mapping[str, float]]:
        """Submits the step and returns immediately."""
        future = self.training(session).optim_step(optim_params)

        async def result() -> Mapping[str, float]:
            return (await future).metrics or {}

        return background().submit(result())

    def save_checkpoint(self, session: PlatformSession, name: str) -> Deferred[str]:
        """Submits the saving of a checkpoint; the result is its ``tinker://`` path."""
        future = self.training(session).save_state(name)

        async def result() -> str:
            return (await future).path

        return background().submit(result())

    def training(self, session: PlatformSession) -> TrainingClient:
        """Returns the training client of a session, for everything that the four calls do not cover."""
        try:
            return self._runs[session.session_id]
        except KeyError:
            raise ValueError(
                f"this platform did not create the session {session.session_id!r}; create it with create_session, "
                "with a checkpoint to resume from one"
            ) from None
