"""The credential command on a server of our own, which exchanges keys for short-lived tokens."""

from __future__ import annotations

import pytest

import tinkex
from tests.contract.backends import BASE_MODEL
from tests.servers import ServedEngine
from tinkex import types
from tinkex.observability.events import NullSink


def test_with_only_a_credential_command_a_session_opens_and_samples(served_engine: ServedEngine) -> None:
    config = tinkex.Config(base_url=served_engine.url, credential_cmd=f"echo {served_engine.key}")
    with tinkex.ServiceClient(config=config, events=NullSink()) as service:
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
        sampler.sample(types.ModelInput.from_ints([5]), 1, types.SamplingParams(max_tokens=1)).result(
            timeout=60
        )
        service.create_rest_client().list_sessions().result(timeout=60)


def test_a_command_that_prints_another_key_is_rejected_by_the_server(served_engine: ServedEngine) -> None:
    config = tinkex.Config(
        base_url=served_engine.url, credential_cmd="echo tml-of-somebody-else", max_retries=0
    )
    with (
        tinkex.ServiceClient(config=config, events=NullSink()) as service,
        pytest.raises(tinkex.AuthenticationError),
    ):
        service.create_sampling_client(base_model=BASE_MODEL)
