"""Clients of a server without keys, which checks the host, origin and content type of every request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

import tinkex
from tests.servers import ServedEngine, serve

pytestmark = [
    pytest.mark.slow,
    # the official client leaves sockets to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

PNG = b"\x89PNG\r\n\x1a\n"
TOKENS = list(range(5, 25))


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    with serve(tmp_path_factory.mktemp("open"), "--no-auth", "--model", f"tiny={tiny_model}") as served:
        yield served


def test_the_official_client_trains_and_samples_without_keys(server: ServedEngine) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-any") as service:
        training = service.create_lora_training_client("tiny", rank=4)
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(TOKENS[:-1]),
            loss_fn_inputs={"target_tokens": TOKENS[1:]},
        )
        passed = training.forward_backward([datum], "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        assert passed.result().metrics["loss:sum"] > 0
        sampler = training.save_weights_and_get_sampling_client()
        params = tinker.SamplingParams(max_tokens=4, stop=[])
        (sample,) = sampler.sample(tinker.ModelInput.from_ints(TOKENS), 1, params).result().sequences
        assert len(sample.tokens) == 4


def test_our_client_trains_streams_and_uploads_without_keys(server: ServedEngine) -> None:
    with tinkex.ServiceClient(base_url=server.url, api_key="tml-any") as service:
        training = service.create_lora_training_client("tiny", rank=4)
        datum = tinkex.Datum(
            model_input=tinkex.ModelInput.from_ints(TOKENS[:-1]),
            loss_fn_inputs={"target_tokens": TOKENS[1:]},
        )
        assert training.forward_backward([datum], "cross_entropy").result(120).metrics["loss:sum"] > 0
        sampler = training.save_weights_and_get_sampling_client()
        params = tinkex.SamplingParams(max_tokens=4, stop=[])
        with sampler.sample_stream(tinkex.ModelInput.from_ints(TOKENS), 1, params) as stream:
            assert sum(isinstance(event, tinkex.types.SampledToken) for event in stream) == 4
        rest = service.create_rest_client()
        rest.upload_asset(("dot.png", PNG)).result(120)
        assert len(rest.list_assets().result(120).assets) == 1
