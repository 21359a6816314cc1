"""Use a failing server: what the client retries, how a step is retried, and what is captured.

You will see a request that succeeds at its third attempt; a rejection that is not retried, caught by its type and
captured as a report; a step that fails after it was accepted and is retried with with_retry; and an invalid argument
that is rejected before any request. The server is a script in this process, so neither a model nor a network is needed.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import tinkex
from tinkex.observability import telemetry
from tinkex.observability.events import RequestFinished, RetryScheduled

FAILED = {"error": "the worker was lost", "category": "server"}
SCRIPT = {  # the replies of each call, of which the last one is repeated
    "create_session": [(200, {"session_id": "session-1"})],
    "get_server_capabilities": [(503, {}), (503, {}), (200, {"supported_models": ["toy"]})],
    "training_runs/other": [(403, {"detail": "this key has no access to that run"})],
    "retrieve_future": [(200, FAILED), (200, FAILED), (200, {"path": "tinker://run-1/weights/a"})],
}
REPORTS: list[dict] = []


class Server(BaseHTTPRequestHandler):
    """Replies as the script says, and collects reports."""

    def do_POST(self) -> None:
        """Answers one request."""
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = self.path.partition("?")[0].removeprefix("/api/v1/")
        if path == "telemetry":
            REPORTS.extend(json.loads(body)["events"])
        script = SCRIPT.get(path, [(200, {})])
        status, value = script.pop(0) if len(script) > 1 else script[0]
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.send_header("retry-after-ms", "20")
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST

    def log_message(self, *_args: object) -> None:
        """Keeps the console for the client."""


class Console:
    """Prints failures and retries."""

    def emit(self, event) -> None:
        """Receives one event of the client."""
        if isinstance(event, RequestFinished) and event.status != 200:
            print(f"  {event.endpoint}, attempt {event.attempt + 1}: {event.status or event.error}")
        elif isinstance(event, RetryScheduled):
            print(f"  retry in {event.after_s:.2f} s: {event.reason.partition(' (')[0]}")


def main() -> None:
    http = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{http.server_port}"
    with tinkex.ServiceClient(base_url=url, api_key="tml-example", events=Console()) as service:
        service.holder.get_session_id()  # opens the session, which reports need
        print("A transient failure:")
        print("  models:", service.get_server_capabilities().model_names())
        print("A rejection:")
        try:
            with telemetry.capture(service):
                service.create_rest_client().get_training_run("other").result()
        except tinkex.PermissionDeniedError as error:
            print(f"  {type(error).__name__} ({error.status_code}), retryable: {error.retryable}")
        print("A step that fails after it was accepted:")
        fast = tinkex.RetryConfig(retry_delay_base=0.05, retry_delay_max=0.1)
        saved = tinkex.with_retry(lambda: service.poll("request-1").result(), fast, events=Console())
        print("  saved", saved["path"])
        print("An invalid argument, rejected before any request:")
        try:
            service.create_sampling_client(model_path="weights/final")
        except ValueError as error:
            print(f"  {type(error).__name__}: {error}")
        service.get_telemetry().stop()
    print("Captured:", [r["event_data"] for r in REPORTS if r.get("event_name") == "user_error"])
    http.shutdown()


if __name__ == "__main__":
    main()
