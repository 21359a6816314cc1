"""Serves a model with a savepoint every few operations: ``python -m tests.durability.often HOME MODEL PORT COUNT``."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import uvicorn

from tests.durability.killable import MODEL
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig
from tinkex.engine.core import Engine


def main() -> None:
    home, model, port, count, *flags = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING)
    config = EngineConfig(
        home=Path(home),
        data_dir=None,
        models={MODEL: model},
        savepoint_after_operations=int(count),
        deterministic="deterministic" in flags,
    )
    engine = Engine(config)
    engine.start()
    engine.load_models().result()
    uvicorn.run(build_app(engine), port=int(port), log_level="error", lifespan="off", ws="none")


if __name__ == "__main__":
    main()
