"""What every suite uses: a tiny random model and a server for it, the fast selection, and the pace of the test process."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.ray_nodes import ENVIRONMENT, HEAD, nodes, ray_python
from tests.servers import ServedEngine, serve
from tests.sessions import close_official_sessions, close_sessions

MIN_FAST_SHARE = 0.6
"""The part of all tests that the fast selection runs."""
FAST_SUITES = {"contract", "durability", "parity"}
"""Suites that the fast selection has tests of."""
SLOW = ("slow", "real_model", "soak")
SLOW_MODULE = re.compile(rf"^pytestmark = (?:\[[^\]]*)?pytest\.mark\.(?:{'|'.join(SLOW)})\b", re.MULTILINE)

# Two threads are what the smallest supported machine has; more of them spin against each other.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Idle threads sleep instead of spinning: with another process on a core, spinning costs a factor of three.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The official client sends telemetry on errors and waits for the reply; tests must not.
os.environ.setdefault("TINKER_TELEMETRY", "0")

# A shell starts background jobs with SIGINT ignored, and children inherit that. Tests of Ctrl-C need the default, which
# children get if this process handles the signal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests never assert absolute times: a busy machine must not fail an example for being slow.
settings.register_profile("tinkex", deadline=None)
settings.register_profile("fast", deadline=None, max_examples=25)
settings.load_profile("tinkex")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast",
        action="store_true",
        help="run no test that is marked slow, and fewer examples of properties",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("fast"):
        settings.load_profile("fast")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A module that is slow as a whole is not even imported for the fast selection."""
    if not config.getoption("fast") or collection_path.suffix != ".py":
        return None
    return bool(SLOW_MODULE.search(collection_path.read_text(encoding="utf-8"))) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    _check_names(items)
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.getoption("fast"):
        _check_fast_selection(items)
    if config.getoption("fast"):
        slow = [item for item in items if _is_slow(item)]
        items[:] = [item for item in items if not _is_slow(item)]
        config.hook.pytest_deselected(items=slow)
    yield
    _put_slow_modules_first(items)


def _is_slow(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in SLOW)


def _check_names(items: list[pytest.Item]) -> None:
    """Rejects cases whose name holds an address: the processes that share the tests must agree on their names."""
    nameless = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if nameless:
        raise pytest.UsageError(f"give these cases ids of their own: {', '.join(nameless)}")


def _check_fast_selection(items: list[pytest.Item]) -> None:
    """Rejects a suite of which ``--fast`` runs too little."""
    fast = [item for item in items if not _is_slow(item)]
    if len(fast) < MIN_FAST_SHARE * len(items):
        raise pytest.UsageError(
            f"--fast runs {len(fast)} of {len(items)} tests, and {MIN_FAST_SHARE:.0%} are required; "
            "make tests faster instead of marking them slow"
        )
    missing = FAST_SUITES - {part for item in fast for part in item.path.parts}
    if missing:
        raise pytest.UsageError(
            f"--fast runs no test of {', '.join(sorted(missing))}; keep some of them fast"
        )


def _put_slow_modules_first(items: list[pytest.Item]) -> None:
    """The longest tests start first: one that starts last leaves the other processes idle until it ends.

    Those are the soak, then the tests with a timeout of their own.
    """
    soak = {item.path for item in items if item.get_closest_marker("soak")}
    long = {item.path for item in items if item.get_closest_marker("timeout")}
    slow = {item.path for item in items if _is_slow(item)}
    items.sort(key=lambda item: (item.path not in soak, item.path not in long, item.path not in slow))


def pytest_collection_finish() -> None:
    """Takes what imports and collection made out of garbage collection: scanning it again and again takes seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def nothing_outlives_its_module() -> Iterator[None]:
    """Ends the heartbeats of clients that tests leave open, which would fail once their server has stopped.

    Then collects garbage, so that the warning of a connection that was never closed is an error in the module that
    opened it. What is left is taken out of garbage collection, so that each collection has a module's objects only.
    """
    yield
    close_sessions()
    close_official_sessions()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Restores the levels of loggers after each test: a command that raises them would fill the output of the next."""
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

    Tests of a module leave sessions open, as programs do, and all their runs count as live until the module ends.
    """
    options = ("--model", f"tiny/llama={tiny_model}", "--max-live-runs", "2000")
    with serve(tmp_path_factory.mktemp("served"), *options) as engine:
        yield engine


@pytest.fixture(scope="session")
def served_pool(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    """The same with two trainers and two samplers."""
    options = ("--model", f"tiny/llama={tiny_model}", "--max-live-runs", "2000")
    pool = ("--trainers", "2", "--samplers", "2", "--threads", "1", "--data-parallel-tokens", "16")
    with serve(tmp_path_factory.mktemp("pool"), *options, *pool) as engine:
        yield engine


@pytest.fixture(scope="session")
def served_ray(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    """The same on a Ray cluster of its own, with a trainer and a sampler."""
    options = ("--model", f"tiny/llama={tiny_model}", "--max-live-runs", "2000")
    lanes = ("--ray", "local", "--trainers", "1", "--samplers", "1", "--threads", "1")
    home = tmp_path_factory.mktemp("ray")
    with serve(home, *options, *lanes, python=ray_python(), env=ENVIRONMENT) as engine:
        yield engine


@pytest.fixture(scope="session")
def served_cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    """The same on a Ray cluster of three nodes, with two trainers and two samplers on two of them."""
    options = ("--model", f"tiny/llama={tiny_model}", "--max-live-runs", "2000")
    lanes = ("--trainers", "2", "--samplers", "2", "--threads", "1", "--data-parallel-tokens", "16")
    home = tmp_path_factory.mktemp("cluster")
    with (
        nodes(home, {HEAD: 0, "127.0.0.3": 2, "127.0.0.4": 2}) as cluster,
        serve(
            home, *options, "--ray", cluster.address, *lanes, python=ray_python(), env=ENVIRONMENT
        ) as engine,
    ):
        yield engine
