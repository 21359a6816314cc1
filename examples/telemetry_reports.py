"""Report exceptions and custom events of a program to the server, redacted and in the background.

You will see an exception captured and raised as usual, a custom report, both delivered before the session ends,
and the number of requests. There is no telemetry for the engine in this process, so the example starts its own
server, unless TINKER_BASE_URL is set.
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
        connection = {"base_url": os.environ.get("TINKER_BASE_URL")}
        if connection["base_url"] in {None, "", "local"}:
            command = [sys.executable, "-m", "tinkex", "--json", "serve", "--port", "0"]
            server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(server.terminate)
            ready = json.loads(server.stdout.readline())
            connection = {"base_url": ready["url"], "api_key": ready["api_key"]}
        metrics = MetricsSink()
        service = stack.enter_context(tinkex.ServiceClient(**connection, events=metrics))
        session_id = service.holder.get_session_id()  # opens the session, which telemetry needs
        print("session", session_id)

        @telemetry.capture(service)
        def step(number: int) -> float:
            return 10 / number

        try:
            step(0)
        except ZeroDivisionError as error:
            print("raised as usual:", error)

        reporter = service.get_telemetry()
        if reporter is None:
            print("telemetry is disabled by TINKER_TELEMETRY")
            return
        print("accepted:", reporter.log("example.finished", {"attempt": 1}, severity="WARNING"))
        reporter.flush()  # otherwise sent within seconds
        print("delivered:", reporter.wait_until_drained(timeout=20))
        for series, count in metrics.metrics.snapshot().counters.items():
            if "telemetry" in series:
                print(f"{series} {count:.0f}")


if __name__ == "__main__":
    main()
