"""Fixtures every suite uses: a tiny random model, and the pace of the test process."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.servers import ServedEngine, serve

# Two threads are what the smallest supported machine has; more of them spin against each other.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Idle threads sleep instead of spinning: with another process on a core, spinning costs a factor of three.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The official client phones home on errors and waits for the answer; tests must not.
os.environ.setdefault("TINKER_TELEMETRY", "0")

# Tests never assert absolute times: a busy machine must not fail an example for being slow.
settings.register_profile("tinkex", deadline=None)
settings.load_profile("tinkex")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse cases whose name holds an address: the processes that share the tests must agree on their names.

    The longest test comes first: begun last, it would leave the other process with nothing to do.
    """
    nameless = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if nameless:
        raise pytest.UsageError(f"give these cases ids of their own: {', '.join(nameless)}")
    items.sort(key=lambda item: item.get_closest_marker("soak") is None)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Loggers leave a test with the levels they came with: a command that turns them up would feed every test after it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {name: each.level for name, each in _our_loggers()}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, each in _our_loggers():
        each.setLevel(levels.get(name, logging.NOTSET))


def _our_loggers() -> list[tuple[str, logging.Logger]]:
    named = logging.Logger.manager.loggerDict.items()
    return [(n, each) for n, each in named if n.startswith("tinkex") and isinstance(each, logging.Logger)]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with its own tokenizer, as an ordinary Hugging Face directory."""
    from tests.models import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def served_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    """`tinkex serve` with the tiny model, in a process of its own, for the whole run.

    Tests leave sessions open, as programs do, and all their runs count as live as long as this process beats for them.
    """
    options = ("--model", f"tiny/llama={tiny_model}", "--max-live-runs", "2000")
    with serve(tmp_path_factory.mktemp("served"), *options) as engine:
        yield engine
