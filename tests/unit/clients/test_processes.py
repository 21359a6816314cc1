"""Clients in forked children, and programs that end while something is in flight."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tests.scripted import ScriptedServer, over_http
from tinkex.testing import reply

pytestmark = pytest.mark.slow

CLIENTS = """
import os, sys
import tinkex

service = tinkex.ServiceClient(base_url=sys.argv[1], api_key="tml-x")
prompt, params = tinkex.ModelInput.from_ints([1, 2, 3]), tinkex.SamplingParams(max_tokens=4)
data = [tinkex.Datum(prompt, {"target_tokens": [2, 3, 4]})]
sampler = service.create_sampling_client(base_model="toy")
training = service.create_lora_training_client("toy", rank=8)
"""


def run(program: str, server: ScriptedServer) -> subprocess.CompletedProcess[str]:
    with over_http(server) as url:
        command = [sys.executable, "-c", CLIENTS + textwrap.dedent(program), url]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def finished(server: ScriptedServer) -> list[dict[str, str]]:
    return [{"state": "finished", "request_id": request_id} for request_id in server.results]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.parametrize("together", [False, True])
def test_a_sampler_forked_along_samples_in_both_processes_under_numbers_of_their_own(together: bool) -> None:
    config = {"sample_use_retrieve_futures": together, "sample_join_sampling_session": together}
    server = ScriptedServer(
        client_config=lambda *_: reply(config),
        join_sampling_session=lambda *_: reply({"client_counter": 7}),
        retrieve_futures=lambda *_: reply({"completions": finished(server), "cursor": 0}),
    )
    ended = run(
        """
        sampler.sample(prompt, 1, params).result(30)
        child = os.fork()
        if child == 0:
            tokens = sampler.sample(prompt, 1, params).result(30).sequences[0].tokens
            print(tokens, sampler.get_base_model(), flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(sampler.sample(prompt, 1, params).result(30).sequences[0].tokens)
        """,
        server,
    )
    assert (ended.stderr, ended.returncode) == ("", 0)
    assert ended.stdout == "[1, 2, 3] toy\n[1, 2, 3]\n"
    first, of_child, second = (value.seq_id for value in server.values("asample"))
    assert (first, second) == (0, 1)
    assert of_child == 7_000_000_000 if together else of_child >= 1_000_000_000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_runs_and_services_belong_to_the_process_that_made_them() -> None:
    server = ScriptedServer()
    ended = run(
        """
        training.forward(data, "cross_entropy").result(30)
        child = os.fork()
        if child == 0:
            for act in (
                lambda: training.forward(data, "cross_entropy"),
                lambda: training.get_info(),
                lambda: service.create_sampling_client(base_model="toy"),
            ):
                try:
                    act()
                except tinkex.ClosedError as error:
                    print("ServiceClient here" in str(error), flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(training.forward(data, "cross_entropy").result(30).metrics["loss:sum"] is not None)
        """,
        server,
    )
    assert (ended.stderr, ended.returncode) == ("", 0)
    assert ended.stdout == "True\n" * 4
    assert [value.seq_id for value in server.values("forward_backward")] == [1, 2]


@pytest.mark.parametrize(
    "last",
    [
        "",
        "sys.exit(3)",
        "threading.Thread(target=futures[0].result, daemon=True).start(); time.sleep(0.2)",
    ],
)
def test_a_program_exits_immediately_and_quietly_with_calls_in_flight(last: str) -> None:
    busy = {"type": "try_again", "request_id": "r", "queue_state": "active"}
    server = ScriptedServer()
    server.answers["retrieve_future"] = lambda value, request: (
        server.results[value.request_id] if value.request_id == "req-0" else reply(busy)
    )
    ended = run(
        f"""
        import threading, time
        futures = [training.forward_backward(data, "cross_entropy") for _ in range(20)]
        futures += [sampler.sample(prompt, 1, params) for _ in range(20)]
        {last}
        """,
        server,
    )
    assert ended.stderr == ""
    assert ended.returncode == (3 if "exit(3)" in last else 0)


def test_a_pending_result_at_exit_is_cancelled() -> None:
    server = ScriptedServer()
    server.answers["retrieve_future"] = lambda value, request: (
        server.results[value.request_id] if value.request_id == "req-0" else reply({"type": "try_again"})
    )
    with over_http(server) as url:
        program = """
        import atexit, concurrent.futures

        def late():
            try:
                futures[0].result()
            except concurrent.futures.CancelledError:
                print("none")

        atexit.register(late)
        """
        command = [
            sys.executable,
            "-c",
            textwrap.dedent(program) + CLIENTS + "futures = [sampler.sample(prompt, 1, params)]",
            url,
        ]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.stdout, ended.stderr) == ("none\n", "")
