"""Telemetry and failing servers: nothing blocks, nothing is raised, and lost reports are counted."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from tests.faults.faulty_server import (
    Fault,
    FaultyServer,
    breaks_off,
    drops,
    fails_with,
    is_slow,
    running,
    says,
    sends_garbage,
    sends_huge_length,
)
from tests.scripted import ScriptedServer
from tinkex import Config, ServiceClient
from tinkex.observability.telemetry import capture
from tinkex.testing import Reply, reply

FAULTS: dict[str, Fault] = {
    "413": fails_with(413),
    "422": fails_with(422),
    "401": fails_with(401),
    "501": fails_with(501),
    "half JSON": says(b'{"status": "acc'),
    "another answer": says(b'{"status": "denied"}'),
    "HTML": says(b"<html>login</html>", "text/html"),
}
PASSING: dict[str, Fault] = {
    "500": fails_with(500),
    "503": fails_with(503),
    "429": fails_with(429),
    "drops": drops,
    "breaks off": breaks_off,
    "no HTTP": sends_garbage,
    "oversize": sends_huge_length,
    "slow": is_slow,
}


class AcceptingServer(ScriptedServer):
    """A scripted server that accepts reports."""

    def on_telemetry(self, value: object, request: object) -> Reply:
        return reply({"status": "accepted"})


def service_of(server: FaultyServer) -> ServiceClient:
    service = ServiceClient(config=Config(api_key="tml-canary", base_url=server.url))
    service.holder.get_session_id()
    return service


def report(service: ServiceClient) -> bool:
    """Reports an exception, which is still raised; returns whether everything arrived."""
    with pytest.raises(ZeroDivisionError), capture(service, fatal=True):
        raise ZeroDivisionError
    reporter = service.get_telemetry()
    assert reporter is not None
    return reporter.wait_until_drained(60)


@pytest.mark.parametrize("name", FAULTS)
def test_permanently_rejected_reports_are_counted_and_later_ones_arrive(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "tinkex"),
        running(FaultyServer("telemetry", FAULTS[name], times=1, scripted=AcceptingServer())) as server,
    ):
        service = service_of(server)
        assert not report(service)
        reporter = service.get_telemetry()
        assert reporter is not None
        assert reporter.num_dropped == 2, "the beginning of the session and the exception"
        assert len(server.bodies("telemetry")) == 1, "it is not retried"
        assert report(service)
        assert reporter.num_dropped == 2
        service.close("success").result(60)
    assert caplog.text == "", "nothing that a user should worry about"


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSING)
def test_reports_that_succeed_on_retry_are_not_lost(name: str) -> None:
    with running(FaultyServer("telemetry", PASSING[name], times=1, scripted=AcceptingServer())) as server:
        service = service_of(server)
        assert report(service)
        reporter = service.get_telemetry()
        assert reporter is not None
        assert reporter.num_dropped == 0
        service.close("success").result(60)


@pytest.mark.slow
def test_a_program_exits_with_its_own_error_when_reports_fail() -> None:
    program = """
import sys, tinkex
from tinkex.observability.telemetry import capture
service = tinkex.ServiceClient(base_url=sys.argv[1], api_key="tml-x")
service.create_sampling_client(base_model="toy")
with capture(service, fatal=True):
    raise RuntimeError("mine")
"""
    environment = {name: value for name, value in os.environ.items() if name != "TINKER_TELEMETRY"}
    for fault in (fails_with(500), drops, sends_garbage):
        with running(FaultyServer("telemetry", fault, scripted=AcceptingServer())) as server:
            ended = subprocess.run(
                [sys.executable, "-c", program, server.url],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        assert ended.returncode == 1
        assert ended.stderr.strip().endswith("RuntimeError: mine")
