"""Exits with 0 if the server of this container is ready, with 1 if it is not: ``python healthcheck.py [PORT]``."""

from __future__ import annotations

import contextlib
import ssl
import sys
import urllib.request

PATH = "/api/v1/healthz"


def is_ready(port: int, timeout_s: float = 4.0) -> bool:
    """Whether a server answers on the loopback, over HTTPS or HTTP, and has loaded its models."""
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE  # it is this container's own
    for scheme in ("https", "http"):
        with contextlib.suppress(OSError):  # no server, another scheme, or 503
            url = f"{scheme}://127.0.0.1:{port}{PATH}"
            with urllib.request.urlopen(url, timeout=timeout_s, context=unverified) as response:  # noqa: S310
                return bool(response.status == 200)
    return False


if __name__ == "__main__":
    sys.exit(0 if is_ready(int(sys.argv[1]) if len(sys.argv) > 1 else 8787) else 1)
