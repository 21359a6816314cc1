"""Use the protocol without a client: open a session over HTTP and send heartbeats.

You will see a session created, a heartbeat answered with 200, a wrong URL and an unknown session with 404, and
the session finished; all with the standard library. The example starts its own server, unless TINKER_BASE_URL
(and TINKER_API_KEY) are set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack


def main() -> None:
    with ExitStack() as stack:
        url, key = os.environ.get("TINKER_BASE_URL"), os.environ.get("TINKER_API_KEY", "")
        if url in {None, "", "local"}:
            command = [sys.executable, "-m", "tinkex", "--json", "serve", "--port", "0"]
            server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(server.terminate)
            ready = json.loads(server.stdout.readline())
            url, key = ready["url"], ready["api_key"]

        def post(path: str, body: dict) -> dict:
            headers = {"X-API-Key": key, "Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/api/v1/{path}", json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    status, answer = response.status, json.loads(response.read() or b"{}")
            except urllib.error.HTTPError as error:
                status, answer = error.code, json.loads(error.read() or b"{}")
            print(f"POST {path}: {status} {answer}")
            return answer

        created = post(
            "create_session", {"tags": ["by-hand"], "sdk_version": "none", "type": "create_session"}
        )
        session = created["session_id"]
        # Clients send a heartbeat every ten seconds; a server ends sessions without heartbeats.
        post("session_heartbeat", {"session_id": session, "type": "session_heartbeat"})
        post("heartbeat", {"session_id": session})
        post("session_heartbeat", {"session_id": "no-such-session", "type": "session_heartbeat"})
        post(f"sessions/{session}/finish", {"reason": {"type": "success"}})


if __name__ == "__main__":
    main()
