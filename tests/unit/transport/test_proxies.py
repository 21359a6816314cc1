"""Every kind of request goes through the proxy of the configuration: calls, streams, downloads and signed URLs."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.scripted import ScriptedServer, over_http
from tests.unit.transport.proxies import HttpProxy, SocksProxy, http_proxy, socks5_proxy
from tests.unit.transport.tls import Certificates, SecureServer, certificates, secure
from tinkex import AdminClient, APIConnectionError, Config, ConfigError, RestClient, ServiceClient, types
from tinkex.checkpoints import Source, fetch
from tinkex.testing import Reply, Request, reply

KEY = "tml-test-0123456789"
CONTENT = bytes(range(256)) * 4000
EVENTS = [
    ("accepted", {"request_id": "r1", "sample_sequence_ids": ["a"]}),
    ("token", {"sample": 0, "index": 0, "token": 7, "logprob": -0.5, "text": "t"}),
    ("done", {"stop_reasons": ["length"], "num_tokens": 1, "num_prompt_tokens": 1}),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(autouse=True)
def no_proxies_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


class Storage(ScriptedServer):
    """A foreign host with files behind signed URLs; remembers what clients send it."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []

    def on_download(self, value: Any, request: Request) -> Reply:
        self.requests.append(request)
        if request.path.endswith("/moved"):
            return Reply(302, {"location": "file?signature=a%2Fb%3D"})
        if request.path.endswith("/audit"):
            return reply({"entries": [{"timestamp": "2026-08-01T00:00:00Z", "event": "kept"}]})
        start = int(request.headers.get("range", "bytes=0-")[6:-1])
        if not start:
            return Reply(200, {"etag": '"v1"'}, CONTENT)
        span = {"content-range": f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}", "etag": '"v1"'}
        return Reply(206, span, CONTENT[start:])


@dataclass
class Servers:
    """An API server and a storage server, both over TLS or both without."""

    api: str
    storage: str
    stored: Storage
    secured: list[SecureServer]

    def signed(self, name: str = "file") -> str:
        return f"{self.storage}/api/v1/downloads/signed-token/{name}?signature=a%2Fb%3D"


@pytest.fixture(scope="module", params=["http", "https"])
def running(request: pytest.FixtureRequest, files: Certificates) -> Iterator[Servers]:
    api, stored = ScriptedServer(), Storage()
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in EVENTS)
    api.answers["stream_sample"] = lambda *_: Reply(200, {"content-type": "text/event-stream"}, body.encode())
    with ExitStack() as stack:
        if request.param == "https":
            secured = [stack.enter_context(secure(server, files)) for server in (api, stored)]
            found = Servers(secured[0].url, secured[1].url, stored, secured)
        else:
            urls = [stack.enter_context(over_http(server)) for server in (api, stored)]
            found = Servers(urls[0], urls[1], stored, [])
        api.answers["audit_log"] = lambda *_: Reply(302, {"location": found.signed("audit")})
        yield found


@pytest.fixture
def servers(running: Servers) -> Servers:
    """The servers, with nothing recorded."""
    running.stored.requests.clear()
    for server in running.secured:
        server.peers.clear()
    return running


def use_everything(config: Config, servers: Servers, directory: Path) -> None:
    """A call, a stream, a download that resumes, a redirected download, and a value behind a signed URL."""
    assert RestClient(config=config).get_sampler("s:sample:0").result(30).base_model == "toy"
    with ServiceClient(config=config) as service:
        sampler = service.create_sampling_client(base_model="toy")
        with sampler.sample_stream(types.ModelInput.from_ints([1]), 1, types.SamplingParams()) as stream:
            assert [event.token for event in stream if isinstance(event, types.SampledToken)] == [7]
            assert stream.streamed
    (directory / "a.part").write_bytes(CONTENT[:1000])
    (directory / "a.part.json").write_text(json.dumps({"validator": '"v1"', "total": len(CONTENT)}))
    assert fetch(Source(servers.signed()), directory / "a", config=config) == len(CONTENT)
    assert (directory / "a").read_bytes() == CONTENT
    assert fetch(Source(servers.signed("moved")), directory / "b", config=config) == len(CONTENT)
    assert AdminClient(config=config).get_audit_log().result(30).entries[0].event == "kept"


def config_for(servers: Servers, files: Certificates, **settings: Any) -> Config:
    return Config(
        api_key=KEY,
        base_url=servers.api,
        ca_file=files.authority,
        default_headers={"authorization": "Bearer private-token"},
        default_query={"tenant": "private-tenant"},
        cloudflare_client_id="private-id",
        cloudflare_client_secret="private-secret",
        telemetry=False,
        max_retries=0,
        **settings,
    )


def check_all_through(proxy: HttpProxy | SocksProxy, servers: Servers) -> None:
    """Every connection to a server came from the proxy."""
    for server in servers.secured:
        assert server.peers
        assert server.peers <= proxy.outgoing


def check_nothing_private(servers: Servers) -> None:
    assert len(servers.stored.requests) >= 4
    for request in servers.stored.requests:
        assert request.query == {"signature": "a/b="}
        shown = json.dumps([dict(request.headers), request.path]).lower()
        for secret in (KEY, "private", "x-api-key", "cf-access", "proxy-authorization", "x-route"):
            assert secret not in shown
    assert servers.stored.requests[0].headers["range"] == "bytes=1000-"


BASIC = "Basic " + base64.b64encode(b"user:pass word").decode()


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True], ids=["over http", "over https"])
@pytest.mark.parametrize(
    ("user", "headers", "authorization"),
    [
        ("user:pass%20word@", {}, BASIC),
        ("user:pass%20word@", {"Proxy-Authorization": "Bearer own", "x-route": "a"}, "Bearer own"),
        ("", {"x-route": "a"}, None),
    ],
    ids=["password", "authorization", "headers"],
)
def test_everything_goes_through_an_http_proxy_with_its_headers(
    tls: bool,
    user: str,
    headers: dict[str, str],
    authorization: str | None,
    servers: Servers,
    files: Certificates,
    tmp_path: Path,
) -> None:
    with http_proxy(files if tls else None) as proxy:
        address = proxy.url.replace("://", f"://{user}")
        use_everything(config_for(servers, files, proxy=address, proxy_headers=headers), servers, tmp_path)
    check_all_through(proxy, servers)
    check_nothing_private(servers)
    for _, seen in proxy.heads:
        assert seen.get("proxy-authorization") == authorization
        assert seen.get("x-route") == headers.get("x-route")
    asked = {first.split()[1] for first, _ in proxy.heads}
    if servers.secured:  # the proxy sees hosts, and nothing of what is meant for the server
        assert asked == {urlsplit(servers.api).netloc, urlsplit(servers.storage).netloc}
        assert all("x-api-key" not in seen for seen in proxy.tunnels)
    else:
        assert servers.signed() in asked
        assert any(target.startswith(f"{servers.api}/api/v1/samplers/s:sample:0") for target in asked)


@pytest.mark.slow
@pytest.mark.parametrize("login", [None, ("us@er", "pass word")], ids=["open", "password"])
@pytest.mark.parametrize("scheme", ["socks5", "socks5h"])
def test_everything_goes_through_a_socks_proxy(
    scheme: str,
    login: tuple[str, str] | None,
    servers: Servers,
    files: Certificates,
    tmp_path: Path,
) -> None:
    user = "us%40er:pass%20word@" if login else ""
    with socks5_proxy(password=login[1] if login else None) as proxy:
        address = f"{scheme}://{user}127.0.0.1:{proxy.port}"
        use_everything(config_for(servers, files, proxy=address), servers, tmp_path)
    check_all_through(proxy, servers)
    check_nothing_private(servers)
    assert set(proxy.logins) == {login}
    assert {port for _, port in proxy.targets} == {
        urlsplit(servers.api).port,
        urlsplit(servers.storage).port,
    }


@pytest.mark.parametrize(("scheme", "host"), [("socks5", "127.0.0.1"), ("socks5h", "localhost")])
def test_socks5_resolves_names_here_and_socks5h_at_the_proxy(scheme: str, host: str, tmp_path: Path) -> None:
    stored = Storage()
    with socks5_proxy() as proxy, over_http(stored) as url:
        config = Config(base_url=url, proxy=f"{scheme}://127.0.0.1:{proxy.port}")
        signed = f"{url}/api/v1/downloads/t/file".replace("127.0.0.1", "localhost")
        assert fetch(Source(signed), tmp_path / "a", config=config) == len(CONTENT)
    assert {target for target, _ in proxy.targets} == {host}


def test_a_socks_proxy_that_rejects_the_login_is_a_connection_error(tmp_path: Path) -> None:
    with socks5_proxy(password="right") as proxy, over_http(Storage()) as url:
        config = Config(base_url=url, proxy=f"socks5://user:wrong-word@127.0.0.1:{proxy.port}", max_retries=0)
        with pytest.raises(APIConnectionError, match=r"through the proxy socks5://…@127\.0\.0\.1") as raised:
            fetch(Source(f"{url}/api/v1/downloads/t/file"), tmp_path / "a", config=config)
    assert "wrong-word" not in str(raised.value)


def test_headers_for_a_socks_proxy_are_rejected_because_it_takes_none() -> None:
    with pytest.raises(ConfigError, match=r"(?i)socks.*proxy_headers|proxy_headers.*socks"):
        Config(proxy="socks5://127.0.0.1:1080", proxy_headers={"x-route": "a"})


@pytest.mark.slow
def test_a_proxy_of_the_environment_is_used_too(
    servers: Servers, files: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with http_proxy() as proxy:
        monkeypatch.setenv("HTTPS_PROXY" if servers.secured else "HTTP_PROXY", proxy.url)
        if not servers.secured:
            monkeypatch.setenv("http_proxy", proxy.url)
        use_everything(config_for(servers, files), servers, tmp_path)
    check_all_through(proxy, servers)
    assert {urlsplit(servers.api).port, urlsplit(servers.storage).port} <= {
        urlsplit(first.split()[1] if "://" in first else f"//{first.split()[1]}").port
        for first, _ in proxy.heads
    }
