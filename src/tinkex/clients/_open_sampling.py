"""Opens samplers: on a checkpoint, on a base model, on the current weights of a run, or one that exists already."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from tinkex import types
from tinkex._wire.endpoints import endpoint
from tinkex.clients._copies import copy_number
from tinkex.clients._operations import require_field
from tinkex.observability.tracing import trace_operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinkex.clients.retry_config import RetryConfig
    from tinkex.clients.sampling import SamplingClient
    from tinkex.clients.session import OpenSession, Session

__all__ = ["open_sampling_client", "open_saved_sampler", "unnamed_save"]


async def open_sampling_client(
    session: Session,
    *,
    model_path: str | None = None,
    base_model: str | None = None,
    sampling_session_id: str | None = None,
    retry_config: RetryConfig | None = None,
    record_stability_info: bool = False,
) -> SamplingClient:
    """Opens a sampler on a checkpoint or a base model, or uses an existing one."""
    from tinkex.clients.sampling import SamplingClient  # which imports this module

    if sampling_session_id is not None:
        opened = await session.opened()
        return SamplingClient(
            session,
            opened,
            sampling_session_id=sampling_session_id,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
            copy=copy_number(opened.client_config),  # another client may use the sampler
        )
    if model_path is None and base_model is None:
        raise ValueError("a sampling client needs a model_path (tinker://…) or a base_model")
    if model_path is not None and not model_path.rpartition(";")[2].startswith("tinker://"):
        raise ValueError(
            f"model_path starts with tinker://, or is <base model>;tinker://…, got {model_path!r}; give a base model as "
            "base_model"
        )
    with trace_operation("create_sampling_client", on=session.caller.config.tracing) as operation:
        opened = await session.opened()
        created: types.CreateSamplingSessionResponse = await session.caller.call(
            endpoint("create_sampling_session"),
            types.CreateSamplingSessionRequest(
                session_id=opened.session_id,
                sampling_session_seq_id=session.next_sampling_session_seq_id(),
                base_model=base_model,
                model_path=model_path,
            ),
        )
        if operation is not None:
            facts = {"session.id": opened.session_id, "gen_ai.request.model": base_model}
            operation.set_attributes({**facts, "tinkex.sampling_session_id": created.sampling_session_id})
    return SamplingClient(
        session,
        opened,
        sampling_session_id=created.sampling_session_id,
        retry_config=retry_config,
        record_stability_info=record_stability_info,
    )


def unnamed_save(
    session: Session, model_id: types.ModelID, kind: types.SamplingClientKind
) -> Callable[[int], types.SaveWeightsForSamplerRequest]:
    """Reserves the number of a new sampler; returns what makes the request of a save that opens it."""
    if kind not in get_args(types.SamplingClientKind):
        raise ValueError(f"kind is {kind!r}; it is 'snapshot' or 'inflight'")
    sampling_session_seq_id = session.next_sampling_session_seq_id()
    return lambda seq_id: types.SaveWeightsForSamplerRequest(
        model_id=model_id,
        seq_id=seq_id,
        sampling_session_seq_id=sampling_session_seq_id,
        kind=None if kind == "snapshot" else kind,
    )


def open_saved_sampler(
    session: Session,
    opened: OpenSession,
    saved: types.SaveWeightsForSamplerResponseInternal,
    retry_config: RetryConfig | None,
    *,
    record_stability_info: bool,
) -> SamplingClient:
    """The client of the sampler that an unnamed save has made."""
    from tinkex.clients.sampling import SamplingClient  # which imports this module

    return SamplingClient(
        session,
        opened,
        sampling_session_id=require_field(
            "sampling_session_id", saved.sampling_session_id, "an unnamed save"
        ),
        retry_config=retry_config,
        record_stability_info=record_stability_info,
    )
