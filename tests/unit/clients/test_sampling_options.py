"""Sampling options that a server may not know: they are sent to servers that offer them, and to no other."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scripted import ScriptedServer
from tinkex import ServiceClient, types
from tinkex.errors import Unsupported
from tinkex.testing import reply

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(
    max_tokens=4, min_p=0.1, structured_output=types.StructuredOutput(regex="[a-z]+")
)


def offers(*names: str) -> ScriptedServer:
    return ScriptedServer(client_config=lambda value, request: reply({"sampling_extensions": list(names)}))


@pytest.mark.parametrize("offered", [(), ("min_p",)])
def test_a_server_that_might_ignore_an_option_never_receives_it(offered: tuple[str, ...]) -> None:
    server = offers(*offered) if offered else ScriptedServer()
    with ServiceClient(transport=server.transport) as service:
        sampler = service.create_sampling_client(base_model="toy")
        with pytest.raises(Unsupported, match="structured_output"):
            sampler.sample(PROMPT, 1, PARAMS)
        with pytest.raises(Unsupported, match="structured_output"):
            sampler.sample_stream(PROMPT, 1, PARAMS)
    assert not {"asample", "stream_sample"} & set(server.names())


def test_a_server_that_offers_the_options_receives_them() -> None:
    server = offers("min_p", "structured_output")
    with ServiceClient(transport=server.transport) as service:
        sampler = service.create_sampling_client(base_model="toy")
        sampler.sample(PROMPT, 1, PARAMS).result(timeout=10)
    sent: list[Any] = server.values("asample")
    assert [one.sampling_params for one in sent] == [PARAMS]
