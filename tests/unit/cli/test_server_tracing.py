"""Export of the server's spans, and the errors of a wrong configuration."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.collector import collecting
from tinkex.cli.server_tracing import requested_exporters, set_up_tracing
from tinkex.errors import SetupError

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, []),
        (ENDPOINT, ["otlp"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, ["otlp"]),
        ({"OTEL_TRACES_EXPORTER": "Console"}, ["console"]),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, []),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, []),
    ],
)
def test_only_the_standard_variables_enable_an_export(environ: dict[str, str], expected: list[str]) -> None:
    assert requested_exporters(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "jaeger"}, "unknown exporter 'jaeger'"),
        (
            {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "'grpc'; this server exports traces only with http",
        ),
    ],
)
def test_an_unsupported_exporter_is_rejected_before_the_server_starts(
    environ: dict[str, str], message: str
) -> None:
    with pytest.raises(SetupError, match=message), set_up_tracing(environ):
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


@pytest.mark.slow
def test_a_server_without_the_sdk_names_the_packages_if_tracing_is_enabled() -> None:
    output = run(WITHOUT_THE_SDK, **ENDPOINT)
    assert output.startswith("SetupError ")
    assert "opentelemetry.sdk" in output
    assert "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http" in output
    assert run(WITHOUT_THE_SDK, OTEL_EXPORTER_OTLP_ENDPOINT="") == "started\n"


EXPORTING = """
from tinkex.cli.server_tracing import set_up_tracing
from tinkex.observability.tracing import trace_operation

with set_up_tracing():
    with trace_operation("probe"):
        pass
    with set_up_tracing():  # a configured provider stays
        pass
"""


@pytest.mark.slow
def test_the_last_spans_are_exported_at_shutdown() -> None:
    with collecting() as collector:
        run(EXPORTING, **{**collector.settings, "OTEL_BSP_SCHEDULE_DELAY": "60000"})
    (span,) = collector.spans
    assert (span.name, span.service) == ("tinkex.probe", "tinkex")
