"""``help()`` of the public types and functions beside the clients explains every argument and has an example that calls it.

An example after ``>>>`` runs; one that needs a server is a code block, and compiles.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tinkex
from tests.docstrings import code_blocks
from tinkex import checkpoints, train
from tinkex.losses import regularizers
from tinkex.observability import process
from tinkex.observability.metrics import Metrics, MetricsSink

TYPES = (
    tinkex.APIFuture,
    tinkex.CircuitBreaker,
    tinkex.Config,
    tinkex.Datum,
    tinkex.ModelInput,
    tinkex.TensorData,
    type(tinkex.circuit_breakers),
    Metrics,
    MetricsSink,
    process.EventLogger,
    regularizers.Pipeline,
    train.TrainingCallback,
    train.TrainingReport,
)
CONSTRUCTED = (
    tinkex.CircuitBreaker,
    tinkex.Config,
    tinkex.Datum,
    tinkex.ModelInput,
    tinkex.TensorData,
    Metrics,
    MetricsSink,
    regularizers.Consistency,
    regularizers.ElasticNet,
    regularizers.Entropy,
    regularizers.GradientPenalty,
    regularizers.KLDivergence,
    regularizers.L1,
    regularizers.L2,
    regularizers.Orthogonality,
    regularizers.Pipeline,
    regularizers.RegularizerSpec,
    train.TrainingCallback,
    train.TrainingReport,
)
"""Types whose own docstring explains the arguments of their constructor."""
FUTURE_METHODS = ("result", "exception", "result_async", "future", "cancel", "add_done_callback")
FUNCTIONS = (
    checkpoints.download_checkpoint,
    checkpoints.extract,
    checkpoints.fetch,
    checkpoints.push_checkpoint,
    checkpoints.resolve_checkpoint,
    checkpoints.resolve_run,
    checkpoints.upload_checkpoint,
    process.attach,
    process.attach_logger,
    process.detach,
    process.metrics,
    regularizers.with_regularizers,
    tinkex.gather,
    tinkex.with_retry,
    tinkex.with_retry_async,
    train.read_data,
    train.resume,
    train.run,
)


def documented() -> Iterator[Any]:
    """Yields every name with what it names."""
    for kind in TYPES:
        for name, method in inspect.getmembers(kind, callable):
            if not name.startswith("_"):
                yield pytest.param(name, method, id=f"{kind.__name__}.{name}")
    for name in FUTURE_METHODS:
        yield pytest.param(
            name, getattr(tinkex.AwaitableConcurrentFuture, name), id=f"AwaitableConcurrentFuture.{name}"
        )
    for item in (*FUNCTIONS, *CONSTRUCTED):
        yield pytest.param(item.__name__, item, id=item.__name__)


DOCUMENTED = list(documented())


@pytest.mark.parametrize(("name", "item"), DOCUMENTED)
def test_help_has_every_argument_and_an_example(name: str, item: Callable[..., Any]) -> None:
    doc = inspect.getdoc(item)
    assert doc is not None
    for parameter in inspect.signature(item).parameters:
        assert parameter == "self" or re.search(rf"``{parameter}\b", doc), parameter
    run = "".join(example.source for example in doctest.DocTestParser().get_examples(doc))
    assert any(f"{name}(" in example for example in (run, *code_blocks(name, doc))), doc


@pytest.mark.parametrize(("name", "item"), DOCUMENTED)
def test_examples_in_help_run(name: str, item: Callable[..., Any]) -> None:
    module = importlib.import_module(item.__module__)
    example = doctest.DocTestParser().get_doctest(
        inspect.getdoc(item) or "", dict(vars(module)), name, module.__file__, 0
    )
    failures: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=failures.append)
    assert not failures, "".join(failures)
