"""A server whose engine computes nothing: measures the cost of the server alone.

    python benchmarks/idle_server.py HOME

Models are loaded and runs created, so that requests are validated; an optimizer step returns immediately.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import uvicorn
import uvloop

from tinkex.cli.server import BACKLOG, KEEP_ALIVE_S, listen
from tinkex.cli.server_protocol import BoundedHttpProtocol
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.engine.lanes.in_process import LocalBackend
from tinkex.types import AdamParams


class IdleBackend(LocalBackend):
    def optim_step(self, run_id: str, params: AdamParams) -> dict[str, float]:  # noqa: ARG002 -- the interface's parameters
        return {}


def main() -> None:
    home = Path(sys.argv[1])
    config = EngineConfig(home=home, data_dir=None, models={"tiny/llama": str(home / "tiny")}, port=0)
    engine = Engine(config, backends=[IdleBackend(config)])
    engine.start()
    engine.load_models().result()
    listener = listen(config.host, config.port)
    server = uvicorn.Server(
        uvicorn.Config(
            build_app(engine),
            log_config=None,
            access_log=False,
            lifespan="off",
            http=BoundedHttpProtocol,
            ws="none",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
    )
    print(
        json.dumps({"url": "http://{}:{}".format(*listener.getsockname()), "api_key": engine.api_key}),
        flush=True,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve(sockets=[listener]))
    engine.close()


if __name__ == "__main__":
    main()
