"""Where a server's spans go, and what it says when they cannot."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.collector import collecting
from tinkex.cli.server_tracing import exporters_asked_for, set_up_tracing
from tinkex.errors import SetupError

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.mark.parametrize(
    ("environ", "asked"),
    [
        ({}, []),
        (ENDPOINT, ["otlp"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, ["otlp"]),
        ({"OTEL_TRACES_EXPORTER": "Console"}, ["console"]),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, []),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, []),
    ],
)
def test_only_the_standard_variables_ask_for_an_export(environ: dict[str, str], asked: list[str]) -> None:
    assert exporters_asked_for(environ) == asked


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"OTEL_TRACES_EXPORTER": "jaeger"}, "'jaeger', which this server does not have"),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "'grpc'; this server sends its traces by http"),
    ],
)
def test_what_a_server_cannot_export_is_said_before_it_starts(environ: dict[str, str], words: str) -> None:
    with pytest.raises(SetupError, match=words), set_up_tracing(environ):
        pass


def run(program: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


WITHOUT_THE_SDK = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("opentelemetry.sdk"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Missing())
from tinkex.cli.server_tracing import set_up_tracing
try:
    with set_up_tracing():
        print("started")
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_server_without_the_sdk_says_what_to_install_if_traces_are_asked_for() -> None:
    said = run(WITHOUT_THE_SDK, **ENDPOINT)
    assert said.startswith("SetupError ")
    assert "opentelemetry.sdk" in said
    assert "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http" in said
    assert run(WITHOUT_THE_SDK, OTEL_EXPORTER_OTLP_ENDPOINT="") == "started\n"


EXPORTING = """
from tinkex.cli.server_tracing import set_up_tracing
from tinkex.observability.tracing import trace_operation

with set_up_tracing():
    with trace_operation("probe"):
        pass
    with set_up_tracing():  # somebody has set it up already: it stays
        pass
"""


def test_the_last_spans_are_handed_over_at_the_end() -> None:
    with collecting() as collector:
        run(EXPORTING, **{**collector.settings, "OTEL_BSP_SCHEDULE_DELAY": "60000"})
    (span,) = collector.spans
    assert (span.name, span.service) == ("tinkex.probe", "tinkex")
