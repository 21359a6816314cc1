from __future__ import annotations

import pytest

from tests.scripted import ScriptedServer
from tinkex import Config, RestClient, ServiceClient, types
from tinkex._wire.endpoints import ENDPOINTS
from tinkex.errors import APIStatusError, HttpRequest, HttpResponse, NotFoundError
from tinkex.recovery.diagnosis import RUN_ENDPOINTS, says_run_is_gone
from tinkex.testing import reply


def not_found(endpoint: str | None, url: str = "http://host/api/v1/x") -> APIStatusError:
    return NotFoundError("gone", HttpResponse(404, request=HttpRequest("POST", url, endpoint)))


@pytest.mark.parametrize("name", sorted(ENDPOINTS))
def test_a_run_is_gone_when_a_call_about_the_run_finds_nothing(name: str) -> None:
    assert says_run_is_gone(not_found(name)) == (name in RUN_ENDPOINTS)


def test_the_address_of_a_call_says_nothing_about_a_run() -> None:
    assert not says_run_is_gone(not_found("get_sampler", "http://host/api/v1/samplers/optim_step"))
    assert not says_run_is_gone(not_found(None, "http://host/api/v1/optim_step"))
    assert says_run_is_gone(not_found("optim_step", "http://host/renamed"))


def test_errors_of_clients_name_the_call() -> None:
    server = ScriptedServer()
    missing = lambda *_: reply({"detail": "no such thing"}, status=404)  # noqa: E731
    server.answers |= {"forward_backward": missing, "get_sampler": missing}
    datum = types.Datum(types.ModelInput.from_ints([1]), {"target_tokens": [2]})
    config = Config(max_retries=0)
    with ServiceClient(transport=server.transport, config=config) as service:
        training = service.create_lora_training_client("toy")
        with pytest.raises(NotFoundError) as of_a_run:
            training.forward_backward([datum], "cross_entropy").result(30)
        with pytest.raises(NotFoundError) as of_a_sampler:
            RestClient(transport=server.transport, config=config).get_sampler("x").result(30)
    assert says_run_is_gone(of_a_run.value)
    assert not says_run_is_gone(of_a_sampler.value)
