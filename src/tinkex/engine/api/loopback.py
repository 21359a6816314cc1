"""A listener on a loopback port for callers in this process who PUT files to signed URLs with an HTTP client of their own.

The embedded engine has no socket; this one is opened with the first upload, serves signed URLs of uploads only, and is closed
with the engine.
"""

from __future__ import annotations

import socket
import threading
from weakref import WeakKeyDictionary

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkex.engine.api.errors import json_response
from tinkex.engine.engine import Engine

SERVED = "/api/v1/uploads/"
CLOSE_TIMEOUT_S = 5.0

_lock = threading.Lock()
_listeners: WeakKeyDictionary[Engine, LoopbackListener] = WeakKeyDictionary()


class LoopbackListener:
    """Serves the uploads of an application on a free port, on a thread of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.origin = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            self._serve,
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="tinkex-uploads", daemon=True
        )
        self._thread.start()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith(SERVED):
            detail = "this address only takes uploads; use the client for everything else."
            await json_response({"detail": detail}, 404)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def close(self) -> None:
        """Stop listening; requests in flight are aborted."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(CLOSE_TIMEOUT_S)
        self._socket.close()


def loopback_origin(engine: Engine) -> str:
    """Returns the scheme, host and port of an engine's listener, which the first call opens; blocks until it does."""
    from tinkex.engine.api.app import build_app

    with _lock:
        listener = _listeners.get(engine)
        if listener is None:
            listener = _listeners[engine] = LoopbackListener(build_app(engine))
        return listener.origin


def close_loopback(engine: Engine) -> None:
    """Close the listener of an engine, if there is one."""
    with _lock:
        listener = _listeners.pop(engine, None)
    if listener is not None:
        listener.close()
