"""Report to a server what went wrong in a program: exceptions and news, redacted, in the background.

You will see an exception captured and raised as ever, a report of the program's own, both delivered before the
session ends, and how many requests that took. The engine in this process is told nothing, so the example
starts a server of its own; with TINKER_BASE_URL it uses that one instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack

import tinkex
from tinkex.observability import telemetry
from tinkex.observability.metrics import MetricsSink


def main() -> None:
    with ExitStack() as stack:
        where = {"base_url": os.environ.get("TINKER_BASE_URL")}
        if where["base_url"] in {None, "", "local"}:
            command = [sys.executable, "-m", "tinkex", "--json", "serve", "--port", "0"]
            server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(server.terminate)
            ready = json.loads(server.stdout.readline())
            where = {"base_url": ready["url"], "api_key": ready["api_key"]}
        metrics = MetricsSink()
        service = stack.enter_context(tinkex.ServiceClient(**where, events=metrics))
        session_id = service.holder.get_session_id()  # reports belong to a session, so it has to be open
        print("session", session_id)

        @telemetry.capture(service)
        def step(number: int) -> float:
            return 10 / number

        try:
            step(0)
        except ZeroDivisionError as error:
            print("raised as ever:", error)

        reporter = service.get_telemetry()
        if reporter is None:
            print("nothing is reported: TINKER_TELEMETRY says so")
            return
        print("taken:", reporter.log("example.finished", {"attempt": 1}, severity="WARNING"))
        reporter.flush()  # they would leave by themselves within seconds
        print("delivered:", reporter.wait_until_drained(timeout=20))
        for series, count in metrics.metrics.snapshot().counters.items():
            if "telemetry" in series:
                print(f"{series} {count:.0f}")


if __name__ == "__main__":
    main()
