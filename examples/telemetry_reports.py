"""Report events and exceptions of a program to its server, redacted and in the background.

You will see reports of all severities, what the reporter did not send, an exception captured and raised as usual, and
then what arrived: every report with its severity and data, secrets masked. The example collects the reports with a
server of its own, which does nothing else.
"""

from __future__ import annotations

import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import tinkex
from tinkex.observability import telemetry
from tinkex.observability.events import TelemetryDataDropped

ARRIVED: list[dict] = []
NOT_SENT: queue.SimpleQueue[TelemetryDataDropped] = queue.SimpleQueue()


class Collector(BaseHTTPRequestHandler):
    """Opens sessions and collects reports."""

    def do_POST(self) -> None:
        """Answers one request."""
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        if self.path.endswith("/telemetry"):
            ARRIVED.extend(body["events"])
        content = json.dumps({"session_id": "session-1", "status": "accepted"}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_args: object) -> None:
        """Keeps the console for the program."""


class Dropped:
    """Collects what telemetry did not send."""

    def emit(self, event) -> None:
        """Receives one event of the client."""
        if isinstance(event, TelemetryDataDropped):
            NOT_SENT.put(event)


def main() -> None:
    http = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{http.server_port}"
    with tinkex.ServiceClient(base_url=url, api_key="tml-example-key", events=Dropped()) as service:
        service.holder.get_session_id()  # opens the session, which telemetry needs
        reporter = service.get_telemetry()
        if reporter is None:
            print("telemetry is disabled by TINKER_TELEMETRY")
            return
        for severity in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
            data = {"step": 3, "note": f"level {severity}", "api_key": "tml-example-key"}
            print(severity, "accepted:", reporter.log(f"example.{severity.lower()}", data, severity))
        print("accepted in part:", reporter.log("example.batch", {"size": 8, "batch": [[1, 2], [3, 4]]}))
        print("not sent:", NOT_SENT.get(timeout=20))

        @telemetry.capture(service)
        def step(number: int) -> float:
            return 10 / number

        try:
            step(0)
        except ZeroDivisionError as error:
            print("raised as usual:", error)
        print("delivered:", reporter.wait_until_drained(timeout=20))
        print("stopped:", reporter.stop())
    http.shutdown()
    print(f"{len(ARRIVED)} reports arrived:")
    for event in ARRIVED:
        name = event.get("event_name") or event.get("error_type") or ""
        print(f"  {event['severity']:8} {event['event']:20} {name} {event.get('event_data') or ''}".rstrip())


if __name__ == "__main__":
    main()
