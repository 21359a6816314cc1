"""The twenty programs of both generations find the same with the official packages they are written for and with ours."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.contract.generations.runner import NAMES, run_all
from tests.official_process import official_command
from tests.parity.conformance import ROOT, installed
from tests.parity.test_programs import assert_same
from tests.servers import ServedEngine

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("version", "style", "programs"), [("0.36.0", "0.36", "programs_036"), ("0.38.0", "0.39", "programs_039")]
)
def test_the_programs_find_the_same_with_the_official_package(
    version: str, style: str, programs: str, served_engine: ServedEngine
) -> None:
    paths = os.pathsep.join([str(installed("tinker", version)), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "TINKER_TELEMETRY": "0"}
    command = official_command(
        "-m",
        "tests.parity.official_programs",
        programs,
        served_engine.url,
        served_engine.key,
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert theirs["version"] == version
    assert list(theirs["found"]) == NAMES
    ours = run_all(style, "server", served_engine.url, served_engine.key)
    assert_same(ours, theirs["found"], style)
