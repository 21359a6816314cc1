"""Further clients of a sampler: in a process that unpickles one, reads its handle, or was forked with it, or by the sampler's id."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tinkex.clients._connection import connect
from tinkex.clients.session import Session

if TYPE_CHECKING:
    from tinkex import types
    from tinkex.clients.retry_config import RetryConfig
    from tinkex.clients.sampling import SamplingClient
    from tinkex.config import Config

__all__ = ["SEQ_IDS_PER_COPY", "copy_number", "make_copy", "restored"]

COPIES = SEQ_IDS_PER_COPY = 1_000_000_000


def copy_number(client_config: types.ClientConfigResponse) -> int | None:
    """The number of a further client of a sampler; None: the server assigns it at the first sample.

    Copies have separate ranges of sequence numbers, or a server would treat their samples as duplicates.
    """
    if client_config.sample_join_sampling_session:
        return None
    return random.randrange(1, COPIES)  # noqa: S311 - not a secret


def restored(
    config: Config,
    session_id: str,
    client_config: types.ClientConfigResponse,
    sampling_session_id: str,
    retry_config: RetryConfig | None,
    record_stability_info: bool,
    dynamic_config: types.ClientDynamicConfigResponse,
) -> SamplingClient:
    """A copy of a sampling client, for this process: of the same sampler, in the same session."""
    from tinkex.clients.sampling import SamplingClient

    client = SamplingClient.__new__(SamplingClient)
    make_copy(
        client,
        config,
        session_id,
        client_config,
        sampling_session_id,
        retry_config,
        record_stability_info,
        dynamic_config,
    )
    return client


def make_copy(
    client: SamplingClient,
    config: Config,
    session_id: str,
    client_config: types.ClientConfigResponse,
    sampling_session_id: str,
    retry_config: RetryConfig | None,
    record_stability_info: bool,
    dynamic_config: types.ClientDynamicConfigResponse,
) -> None:
    """Makes ``client``, new or inherited by a fork, such a copy."""
    session = Session(connect(config=config, transport=None, events=None))
    session.dynamic_config = dynamic_config
    client.__init__(  # type: ignore[misc]  # its state belongs to the other process
        session,
        session.join(session_id, client_config),
        sampling_session_id=sampling_session_id,
        retry_config=retry_config,
        record_stability_info=record_stability_info,
        copy=copy_number(client_config),
    )
