"""A cluster whose nodes encrypt what they send each other, with certificates that deploy/ray-certificate.sh makes."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.durability.killable import MODEL, KillableServer
from tests.ray_nodes import ENVIRONMENT, HEAD, ROOT, Nodes, nodes, ray_python
from tinkex import ModelInput, SamplingParams, ServiceClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OTHER = "127.0.0.3"
SCRIPT = ROOT / "deploy" / "ray-certificate.sh"
AUTHORITY = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=tinkex-ray -keyout ca.key -out ca.crt"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a certificate of both nodes."""
    authority, directory = (tmp_path_factory.mktemp(name) for name in ("authority", "node"))
    for command in (["openssl", *AUTHORITY.split()], ["sh", SCRIPT, authority, directory, HEAD, OTHER]):
        subprocess.run(command, cwd=authority, check=True, capture_output=True)
    return directory


@pytest.fixture(scope="module")
def environment(made: Path) -> dict[str, str]:
    """Of every node, and of the server."""
    return {
        **ENVIRONMENT,
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(made / "tls.crt"),
        "RAY_TLS_SERVER_KEY": str(made / "tls.key"),
        "RAY_TLS_CA_CERT": str(made / "ca.crt"),
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[Nodes]:
    with nodes(tmp_path_factory.mktemp("nodes"), {HEAD: 0, OTHER: 2}, environment) as started:
        yield started


def test_lanes_on_another_node_train_and_sample_over_tls(
    cluster: Nodes, environment: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    options = ("--ray", cluster.address, "--trainers", "1", "--samplers", "1", "--threads", "1")
    server = KillableServer(tmp_path, tiny_model, *options, python=ray_python(), env=environment)
    with server, ServiceClient(base_url=server.url, api_key=server.key) as service:
        training = service.create_lora_training_client(MODEL, rank=2)
        prompt, params = ModelInput.from_ints([1, 2, 3]), SamplingParams(max_tokens=8, seed=7, stop=[])
        sampling = training.save_weights_and_get_sampling_client()
        assert len(sampling.sample(prompt, 1, params).result().sequences[0].tokens) == 8
        server.stop()


def test_the_head_accepts_only_those_with_a_certificate(cluster: Nodes, made: Path) -> None:
    host, _, port = cluster.address.rpartition(":")

    def is_answered(context: ssl.SSLContext) -> bool:
        context.set_alpn_protocols(["h2"])
        try:
            with (
                socket.create_connection((host, int(port)), timeout=30) as plain,
                context.wrap_socket(plain, server_hostname=host) as encrypted,
            ):
                encrypted.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
                return bool(encrypted.recv(1))
        except (ssl.SSLError, ConnectionError):
            return False

    known, unknown = (ssl.create_default_context(cafile=made / "ca.crt") for _ in range(2))
    known.load_cert_chain(made / "tls.crt", made / "tls.key")
    assert is_answered(known)
    assert not is_answered(unknown)
