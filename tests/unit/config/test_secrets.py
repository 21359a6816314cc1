"""A secret given to the client is nowhere to be read: not in a text form, a log, an event or an error."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import pytest

from tests.scripted import ScriptedServer, over_http
from tinkex import AdminClient, Config, RestClient, ServiceClient, TinkexError, types
from tinkex._transport.http import HttpTransport
from tinkex.observability.events import Event
from tinkex.testing import reply

CANARY = "canary0123456789"
SECRETS: dict[str, Any] = {
    "api_key": f"tml-{CANARY}-key",
    "cloudflare_client_secret": f"{CANARY}-cloud",
    "default_headers": {"x-team-token": f"{CANARY}-header", "authorization": f"Bearer {CANARY}"},
    "default_query": {"signature": f"{CANARY}-query"},
    "credential_cmd": f"echo tml-{CANARY}-command",
}


class Kept:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def emit(self, event: Event) -> None:
        self.texts.append(repr(event))


def quoting(value: Any, request: Any) -> Any:
    """A server that throws back whatever it was sent."""
    return reply({"detail": f"rejected: {dict(request.headers)}"}, status=403)


def test_no_secret_leaves_by_texts_logs_events_or_errors(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    seen = Kept()
    server = ScriptedServer(optim_step=quoting)
    with over_http(server) as url:
        config = Config(base_url=url, dump_headers=True, log_level="debug", **SECRETS)
        service = ServiceClient(config=config, events=seen)
        training = service.create_lora_training_client("toy")
        sampler = training.save_weights_and_get_sampling_client()
        sample = sampler.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams())
        rest = RestClient(config=config)
        rest.get_sampler("s").result(10)
        with pytest.raises(TinkexError) as rejected:
            training.optim_step(types.AdamParams()).result(10)
        texts = [
            *(repr(thing) for thing in _within(service, training, sampler, rest, AdminClient(config=config))),
            repr(sample.result(10)),
            repr(HttpTransport(config)),
            str(rejected.value),
            repr(rejected.value),
            "".join(traceback.format_exception(rejected.value)),
            sampler.get_sampler_handle(),
            *seen.texts,
            caplog.text,
        ]
        service.close("success").result(10)
    assert "x-api-key" in caplog.text, "the headers were dumped"
    assert "application/json" in caplog.text
    leaks = [text for text in texts if CANARY in text]
    assert not leaks, leaks[0][:500]


def _within(*things: Any) -> list[Any]:
    """The things, and what they hold, down to the transports."""
    found: list[Any] = []
    for thing in things:
        found.append(thing)
        for name in ("_session", "_caller", "_opened", "_calls", "_operations", "_retry_config"):
            inner = getattr(thing, name, None)
            if inner is not None:
                found += [inner, getattr(inner, "caller", None), getattr(inner, "config", None)]
                found += [getattr(inner, "transport", None), getattr(inner, "tokens", None)]
    return found


def test_a_proxy_s_password_and_headers_are_not_shown() -> None:
    config = Config(
        proxy=f"http://user:{CANARY}@proxy:3128", proxy_headers={"proxy-authorization": f"Basic {CANARY}"}
    )
    assert CANARY not in repr(config)
    assert "proxy:3128" in repr(config)


def test_headers_are_dumped_only_where_enabled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for dump in (False, True):
        caplog.clear()
        server = ScriptedServer()
        config = Config(api_key="tml-x", dump_headers=dump)
        with ServiceClient(config=config, transport=server.transport) as service:
            service.get_server_capabilities()
        assert ("GET /api/v1/get_server_capabilities" in caplog.text) is dump


def test_the_log_level_is_that_of_the_setting() -> None:
    logger = logging.getLogger("tinkex")
    before = logger.level
    try:
        RestClient(config=Config(api_key="tml-x", log_level="error"))
        assert logger.level == logging.ERROR
        RestClient(config=Config(api_key="tml-x"))
        assert logger.level == logging.ERROR, "without the setting the program's own choice stays"
    finally:
        logger.setLevel(before)
