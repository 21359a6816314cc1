"""Use a server with a failing endpoint, and see the circuit breaker open, spare the rest, probe and close.

You will see three failures of one endpoint open its breaker, for one key only; another endpoint still works, and calls of
another key are still sent; after the cool-down a probe succeeds. Then a breaker of your own guards a function, and is
reset. The server is a few lines of this example, so it needs neither a model nor a network.
"""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import tinkex
from tinkex.observability.events import CircuitChanged

ENDPOINT = "get_server_capabilities"


class _Server(BaseHTTPRequestHandler):
    broken = True

    def do_GET(self) -> None:
        failing = _Server.broken and self.path.endswith(ENDPOINT)
        body = b'{"detail": "out of order"}' if failing else b'{"status": "ok", "supported_models": []}'
        self.send_response(500 if failing else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


class _Console:
    def emit(self, event) -> None:
        if isinstance(event, CircuitChanged):
            print(f"  event: {event.endpoint} is {event.state} ({event.reason})")


def outcome(call) -> str:
    try:
        call()
    except tinkex.CircuitOpenError as error:
        return f"not sent, next try in {error.retry_after_s:.1f} s"
    except tinkex.InternalServerError as error:
        return f"status {error.status_code}"
    return "ok"


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    breaker = {"circuit_breaker_failures": 3, "circuit_breaker_cooldown": 3}
    configs = {
        n: tinkex.Config(api_key=f"tml-{n}", base_url=url, max_retries=0, **breaker) for n in ("ada", "ben")
    }
    ada, ben = (tinkex.ServiceClient(config=config, events=_Console()) for config in configs.values())
    for _ in range(4):
        print("ada, capabilities:", outcome(ada.get_server_capabilities))
    print("ada, health:", outcome(lambda: ada.create_rest_client().get_health().result()))
    print("ben, capabilities:", outcome(ben.get_server_capabilities))
    for name in configs:
        print(f"state for {name}:", tinkex.circuit_breakers.state(url, ENDPOINT, f"tml-{name}"))
    _Server.broken = False
    while tinkex.circuit_breakers.state(url, ENDPOINT, "tml-ada") == "open":
        time.sleep(0.1)  # the cool-down
    print("ada, capabilities:", outcome(ada.get_server_capabilities))
    own = tinkex.CircuitBreaker("parser", failure_threshold=1)
    try:
        own.call(int, "not a number")
    except ValueError:
        print("own breaker:", own.state())
    own.reset()
    print("own breaker after reset:", own.call(int, "42"))
    server.shutdown()


if __name__ == "__main__":
    main()
