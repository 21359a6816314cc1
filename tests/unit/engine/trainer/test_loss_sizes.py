"""The size that is computed for an operation of a custom loss is never less than what it makes, however the call is written."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from tinkex.engine.trainer.loss_graph import OP_ERRORS
from tinkex.engine.trainer.loss_ops import METHODS, NAMESPACES, STRINGS, AllowedOp
from tinkex.engine.trainer.loss_sizes import tensors_in

CALLS_EACH = 60
WRITTEN_AS = {"torch": "", "special": "special_", "linalg": "linalg_", "Tensor": ""}
BY_PREFIX = dict(NAMESPACES)
TABLES = {
    "torch": BY_PREFIX["torch."],
    "special": BY_PREFIX["torch.special."],
    "linalg": BY_PREFIX["torch.linalg."],
    "Tensor": METHODS,
}


def tensor(rng: random.Random) -> torch.Tensor:
    shape = [rng.choice([0, 1, 2, 3, 4]) for _ in range(rng.randint(0, 3))]
    values = torch.tensor([rng.uniform(-1, 3) for _ in range(math.prod(shape))]).reshape(shape)
    return rng.choice([values, values.abs().long(), values > 1])


def value(kind: str, rng: random.Random) -> Any:
    """Something that an argument of this type of torch's could be."""
    if kind.startswith("Optional["):
        return None if rng.random() < 0.4 else value(kind[9:-1], rng)
    makers: dict[str, Any] = {
        "Tensor": lambda: tensor(rng),
        "List[Tensor]": lambda: [tensor(rng)] * rng.randint(1, 3),
        "int": lambda: rng.choice([-1, 0, 1, 2, 7]),
        "number": lambda: rng.choice([-1, 0, 2, 9, 0.5]),
        "float": lambda: rng.uniform(0.1, 3),
        "List[int]": lambda: [rng.choice([-1, 0, 1, 2, 6]) for _ in range(rng.randint(1, 4))],
        "bool": lambda: rng.random() < 0.5,
        "str": lambda: rng.choice(sorted(STRINGS)),
    }
    return makers[kind]() if kind in makers else None


def forms(where: str, name: str) -> list[list[tuple[str, str]]]:
    """The names and types of the arguments, in each of the ways the operation can be called."""
    found = torch._C._jit_get_schemas_for_operator(f"aten::{WRITTEN_AS[where]}{name}")  # noqa: SLF001 - torch has no other way
    return [
        [(one.name, str(one.type)) for one in schema.arguments]
        for schema in found
        if not any(one.is_out for one in schema.arguments)
    ]


def check(operation: AllowedOp, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the call worked; fails if it made more than its size says."""
    try:
        size = operation.size(args, kwargs)
        made = operation.call(*args, **kwargs)
    except OP_ERRORS:
        return False
    elements = sum(one.numel() for one in tensors_in(made))
    # Results that come in twos, such as values and their positions, count as one.
    assert elements <= 2 * size.elements + 2, (size, args, kwargs)
    return True


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", TABLES)
def test_no_call_makes_more_than_its_size_says(where: str) -> None:
    rng = random.Random(5)
    worked = 0
    for name, operation in TABLES[where].items():
        ways = forms(where, name)
        for _ in range(CALLS_EACH if ways else 0):
            given = [(one, value(kind, rng)) for one, kind in rng.choice(ways)]
            given = given[: rng.randint(1, len(given))]
            positional = rng.randint(0 if where == "torch" else 1, len(given))
            if positional > (operation.max_positional or len(given)):
                continue
            named = [("input" if one == "self" else one, item) for one, item in given[positional:]]
            rng.shuffle(named)
            kwargs = {one: item for one, item in named if item is not None}
            if operation.keywords is None or operation.keywords >= kwargs.keys():
                worked += check(operation, [item for _, item in given[:positional]], kwargs)
    assert worked > len(TABLES[where])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_index_picks_more_than_its_size_says() -> None:
    rng = random.Random(6)
    getitem = BY_PREFIX["operator."]["getitem"]
    parts: list[Any] = [
        *(lambda: rng.randint(-1, 2), lambda: slice(None), lambda: slice(0, rng.randint(0, 5), 2)),
        *(lambda: None, lambda: Ellipsis, lambda: True, lambda: tensor(rng)),
        *(lambda: [0] * rng.randint(1, 4), lambda: [[0] * 4] * rng.randint(1, 4), lambda: [tensor(rng)] * 2),
    ]
    worked = 0
    for _ in range(5000):
        index = tuple(rng.choice(parts)() for _ in range(rng.randint(1, 4)))
        worked += check(getitem, [tensor(rng), index if rng.random() < 0.6 else index[0]], {})
    assert worked > 500
