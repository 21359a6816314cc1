"""TLS, HTTP/2, private certificate authorities and proxies, each with a real counterpart."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripted import ScriptedServer, over_http
from tests.unit.transport.proxies import http_proxy
from tests.unit.transport.tls import Certificates, certificates, secure
from tinkex import APIConnectionError, Config, ConfigError, RestClient, ServiceClient, types
from tinkex.testing import Reply, Request, reply

pytestmark = pytest.mark.slow

PARAMS = types.SamplingParams(max_tokens=3)
KEY = "tml-test-0123456789"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(autouse=True)
def no_proxies_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def use(config: Config) -> None:
    """A whole small program: training and a hundred concurrent samples."""
    with ServiceClient(config=config) as service:
        training = service.create_lora_training_client("toy", rank=8)
        datum = types.Datum(types.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})
        assert training.forward_backward([datum], "cross_entropy").result(30).metrics["loss:sum"] == 6.0
        sampler = training.save_weights_and_get_sampling_client()
        prompts = [types.ModelInput.from_ints([place, 7]) for place in range(100)]
        samples = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts]
        assert [s.result(30).sequences[0].tokens for s in samples] == [[place, 7] for place in range(100)]


@pytest.mark.slow
def test_over_tls_requests_share_the_client_s_own_connections(files: Certificates) -> None:
    with secure(ScriptedServer(), files) as server:
        use(Config(api_key=KEY, base_url=server.url, ca_file=files.authority))
    assert "1.1" in server.versions
    assert len(server.versions) > 200
    assert len(server.peers) < 200  # at most 64 per purpose, not one per request


def waits_for(number: int) -> ScriptedServer:
    """A server that replies to nobody until it has so many requests at the same time."""
    arrived: list[Request] = []
    all_here = asyncio.Event()

    async def sampler(_: Any, request: Request) -> Reply:
        arrived.append(request)
        if len(arrived) == number:
            all_here.set()
        await all_here.wait()
        return reply({"sampler_id": "s", "base_model": "toy"})

    return ScriptedServer(get_sampler=sampler)


@pytest.mark.slow
def test_more_pending_requests_than_own_connections_share_a_few_by_http_2(files: Certificates) -> None:
    with secure(waits_for(110), files) as server:
        rest = RestClient(config=Config(api_key=KEY, base_url=server.url, ca_file=files.authority))
        pending = [rest.get_sampler("s:sample:0") for _ in range(110)]
        assert {future.result(120).base_model for future in pending} == {"toy"}
    assert server.versions.count("1.1") <= 64
    assert server.versions.count("2") >= 46
    assert len(server.peers) < 80


def test_a_stream_over_tls_is_carried_by_http_2(files: Certificates) -> None:
    scripted = ScriptedServer()
    done = {"stop_reasons": ["length"], "num_tokens": 0, "num_prompt_tokens": 1}
    body = f"event: done\ndata: {json.dumps(done)}\n\n".encode()
    scripted.answers["stream_sample"] = lambda *_: Reply(200, {"content-type": "text/event-stream"}, body)
    with secure(scripted, files) as server:
        config = Config(api_key=KEY, base_url=server.url, ca_file=files.authority, telemetry=False)
        with ServiceClient(config=config) as service:
            sampler = service.create_sampling_client(base_model="toy")
            with sampler.sample_stream(types.ModelInput.from_ints([1]), 1, PARAMS) as stream:
                list(stream)
                assert stream.streamed
    assert "2" in server.versions


@pytest.mark.slow
def test_a_private_authority_is_trusted_by_the_usual_variable_too(
    files: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(files.authority))
    with secure(ScriptedServer(), files) as server:
        rest = RestClient(base_url=server.url, api_key=KEY)
        assert rest.get_sampler("s:sample:0").result(30).base_model == "toy"
        assert set(server.versions) == {"1.1"}


def test_a_certificate_of_an_unknown_authority_is_rejected(files: Certificates) -> None:
    with secure(ScriptedServer(), files) as server:
        config = Config(api_key=KEY, base_url=server.url, max_retries=0)
        with pytest.raises(APIConnectionError, match=r"(?i)certificate.*ca_file") as rejected:
            RestClient(config=config).get_sampler("x").result(30)
        assert KEY not in str(rejected.value)
        assert server.versions == []


def test_a_file_of_certificates_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.pem' cannot be read"):
        Config(ca_file=tmp_path / "nowhere.pem")
    (tmp_path / "empty.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="contains no PEM certificate"):
        Config(ca_file=tmp_path / "empty.pem")


BASIC = "Basic " + base64.b64encode(b"user:pass word").decode()


def with_user(url: str) -> str:
    return url.replace("http://", "http://user:pass%20word@")


@pytest.mark.parametrize(
    ("address", "headers", "expected"),
    [
        (with_user, {}, BASIC),
        (with_user, {"Proxy-Authorization": "Bearer own"}, "Bearer own"),
        (str, {"x-route": "a"}, None),
    ],
)
def test_https_goes_through_a_tunnel_and_http_by_its_whole_address(
    files: Certificates, address: Any, headers: dict[str, str], expected: str | None
) -> None:
    scripted = ScriptedServer()
    with http_proxy() as between, secure(scripted, files) as server, over_http(scripted) as plain_url:
        for url in (server.url, plain_url):
            config = Config(
                api_key=KEY,
                base_url=url,
                ca_file=files.authority,
                proxy=address(between.url),
                proxy_headers=headers,
            )
            assert RestClient(config=config).get_sampler("s:sample:0").result(30).base_model == "toy"
    tunnels = [(first, seen) for first, seen in between.heads if first.startswith("CONNECT ")]
    whole = [(first, seen) for first, seen in between.heads if not first.startswith("CONNECT ")]
    assert {first.split()[1] for first, _ in tunnels} == {server.url.removeprefix("https://")}
    assert any(first.startswith(f"GET {plain_url}/api/v1/samplers/s:sample:0 ") for first, _ in whole)
    for _, seen in between.heads:
        assert seen.get("proxy-authorization") == expected
        assert seen.get("x-route") == headers.get("x-route")
    # what is meant for the server stays inside the tunnel
    assert all("x-api-key" not in seen for _, seen in tunnels)
    assert all("proxy-authorization" not in seen for seen in server.headers)
    assert server.headers[0]["x-api-key"] == KEY


def test_an_unreachable_proxy_is_named_in_the_error() -> None:
    config = Config(
        api_key=KEY, base_url="http://127.0.0.1:9", proxy="http://user:hidden@127.0.0.1:1", max_retries=0
    )
    rest = RestClient(config=config)
    with pytest.raises(APIConnectionError, match=r"through the proxy http://…@127\.0\.0\.1:1") as lost:
        rest.get_sampler("x").result(30)
    assert "hidden" not in str(lost.value)


def test_the_environment_names_the_proxy_and_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    with http_proxy() as between, over_http(ScriptedServer()) as url:
        monkeypatch.setenv("TINKEX_PROXY", between.url)
        monkeypatch.setenv("TINKEX_PROXY_HEADERS", '[["x-route", "b"]]')
        rest = RestClient(base_url=url, api_key=KEY)
        assert rest.get_sampler("s:sample:0").result(30).base_model == "toy"
    assert {seen["x-route"] for _, seen in between.heads} == {"b"}
