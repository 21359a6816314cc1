"""Programs of the official client that exit without closing: their runs block nobody, and stay within the memory of runs."""

from __future__ import annotations

import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import tinker
from tinker import types

from tests.exposition import read_exposition
from tests.official_process import official_command
from tests.servers import ServedEngine, serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),  # the official client leaves sockets to the garbage collector
]

MODEL = "tiny/llama"
NUM_PROGRAMS, RUNS_PER_PROGRAM = 2, 32
MAX_LIVE_BYTES = 2 * 2**20
PROGRAM = """
import sys, tinker
from tinker import types
url, key, number = sys.argv[1:]
for _ in range(int(number)):
    service = tinker.ServiceClient(base_url=url, api_key=key)
    training = service.create_lora_training_client("tiny/llama", rank=16, seed=1)
    tokens = [5, 6, 7, 8]
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]})
    training.forward_backward([datum], "cross_entropy").result()
    print(training.model_id, flush=True)
"""


def metrics(server: ServedEngine) -> dict[str, float]:
    request = urllib.request.Request(f"{server.url}/metrics", headers={"X-API-Key": server.key})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return read_exposition(reply.read().decode())


def abandon_runs(server: ServedEngine) -> list[str]:
    """The runs of programs that ended without closing them."""
    command = official_command("-c", PROGRAM, server.url, server.key, str(RUNS_PER_PROGRAM))
    programs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(NUM_PROGRAMS)
    ]
    runs: list[str] = []
    for program in programs:
        printed, errors = program.communicate(timeout=240)
        assert program.returncode == 0, errors
        runs += printed.split()
    return runs


@pytest.mark.timeout(400)
def test_new_runs_open_beside_64_abandoned_ones_within_the_memory_of_runs(
    tiny_model: Path, tmp_path: Path
) -> None:
    options = ("--max-live-bytes", str(MAX_LIVE_BYTES), "--threads", "1")
    with serve(tmp_path, "--model", f"{MODEL}={tiny_model}", *options) as server:
        abandoned = abandon_runs(server)
        assert len(set(abandoned)) == NUM_PROGRAMS * RUNS_PER_PROGRAM
        left = metrics(server)
        assert left["tinkex_live_bytes"] <= left["tinkex_live_limit_bytes"] == MAX_LIVE_BYTES
        assert left["tinkex_live_runs"] < len(abandoned), "not all of them fit"
        service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
        with service:
            durations = []
            for _ in range(4):
                started = time.monotonic()
                training = service.create_lora_training_client(MODEL, rank=16, seed=1)
                training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
                durations.append(time.monotonic() - started)
                assert metrics(server)["tinkex_live_bytes"] <= MAX_LIVE_BYTES
        rejected = [
            series
            for series in metrics(server)
            if series.startswith("tinkex_requests_total") and 'status="429"' in series
        ]
        assert not rejected, "nobody was asked to wait"
        print(f"new runs opened in {durations}")
