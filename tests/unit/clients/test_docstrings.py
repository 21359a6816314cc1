"""``help()`` of every public method of a client explains its arguments and has an example that calls it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import tinkex
from tests.docstrings import code_blocks

CLIENTS = (
    tinkex.ServiceClient,
    tinkex.TrainingClient,
    tinkex.SamplingClient,
    tinkex.RestClient,
    tinkex.AdminClient,
)
METHODS = [
    pytest.param(name, method, id=f"{client.__name__}.{name}")
    for client in CLIENTS
    for name, method in inspect.getmembers(client, callable)
    if not name.startswith("_")
]


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_help_has_every_argument_and_an_example(name: str, method: Callable[..., Any]) -> None:
    doc = inspect.getdoc(method)
    assert doc is not None
    for parameter in inspect.signature(method).parameters:
        assert parameter == "self" or re.search(rf"\b{parameter}\b", doc), parameter
    examples = code_blocks(name, doc)
    assert any(f"{name}(" in example for example in examples), examples


def test_help_of_a_pass_names_the_losses() -> None:
    doc = inspect.getdoc(tinkex.TrainingClient.forward_backward)
    assert doc is not None
    for loss in ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"):
        assert f"``{loss}``" in doc
