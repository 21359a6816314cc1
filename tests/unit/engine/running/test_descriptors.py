"""A process without a free file descriptor: accepted saves wait for one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import logging, os, resource, sys, threading
from pathlib import Path
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tests.unit.engine.api.asgi import Client
from tinkex.engine.api.app import build_app

class Retried(logging.Handler):
    seen = threading.Event()
    def emit(self, record):
        if "is retried" in record.getMessage():
            self.seen.set()

logging.getLogger("tinkex.engine").addHandler(Retried())
engine = Engine(EngineConfig(home=Path(sys.argv[1]), models={"tiny": sys.argv[2]}, long_poll_s=0.2))
engine.start()
engine.load_models().result()
client = Client(build_app(engine), engine.api_key)
run = client.create()
save = {"model_id": run, "path": "kept", "seq_id": 1, "type": "save_weights"}
with engine.paused():
    submitted = client.post("save_weights", save)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
retried = Retried.seen.wait(30)
for descriptor in taken:
    os.close(descriptor)
print(retried, client.result(submitted).json)
engine.close()
"""


def test_a_save_waits_for_a_free_descriptor(tiny_model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(tiny_model)],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert done.stdout.startswith("True {"), done.stdout + done.stderr
    assert "weights/kept" in done.stdout
