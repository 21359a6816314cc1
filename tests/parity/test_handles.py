"""Sampler handles are exchanged with the official client, in both directions."""

from __future__ import annotations

import pytest
import tinker

import tinkex
from tests.servers import ServedEngine

MODEL = "tiny/llama"

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the official client leaves sockets to the garbage collector


@pytest.mark.parametrize(("giver", "taker"), [(tinkex, tinker), (tinker, tinkex)], ids=["ours", "theirs"])
def test_a_handle_of_one_client_is_a_sampler_of_the_other(giver, taker, served_engine: ServedEngine) -> None:
    with giver.ServiceClient(base_url=served_engine.url, api_key=served_engine.key) as service:
        original = service.create_sampling_client(base_model=MODEL)
        copy = taker.SamplingClient.from_sampler_handle(
            original.get_sampler_handle(), api_key=served_engine.key
        )
        tokens = [
            client.sample(
                sdk.ModelInput.from_ints([5, 6, 7]),
                1,
                sdk.SamplingParams(max_tokens=6, temperature=0.0, stop=[]),
            )
            .result()
            .sequences[0]
            .tokens
            for sdk, client in ((giver, original), (taker, copy))
        ]
    assert list(tokens[0]) == list(tokens[1])
