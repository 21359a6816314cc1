"""Runs every allowed operation of custom losses on extreme integers; the last line printed is the one that is running.

A program of its own, because what it looks for ends the process.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from tinkex.engine.trainer.loss_graph import OP_ERRORS
from tinkex.engine.trainer.loss_ops import METHODS, NAMESPACES, AllowedOp

DTYPES = (torch.int64, torch.int32)
MAX_COST = 2**14
KEYWORDS: tuple[dict[str, Any], ...] = ({}, {"rounding_mode": "floor"}, {"rounding_mode": "trunc"})


def operands(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """The arguments of calls, with one operand, two and more; enough elements for vectorized kernels."""
    limits = torch.iinfo(dtype)
    smallest, minus = torch.full([33], limits.min, dtype=dtype), torch.full([33], -1, dtype=dtype)
    mixed = torch.tensor([limits.min, limits.max, 0, 1, -1, limits.min + 1] * 20, dtype=dtype)
    yield from ((smallest,), (mixed,), (mixed, mixed), (mixed, 0, mixed), (mixed, 0, mixed, mixed))
    for other in (-1, 2**32 - 1, minus, minus.long(), minus[0]):
        yield from ((smallest, other), (other, smallest))
    yield (smallest[0], minus)
    yield from ((smallest, minus, minus), (smallest, -1, -1), (0, 10, -1), (0.0, 10.0, 0.5))


def operations() -> Iterator[tuple[str, AllowedOp]]:
    """Every operation once, by one of its names."""
    seen: set[int] = set()
    for prefix, table in (*NAMESPACES, ("Tensor.", METHODS)):
        for name, operation in table.items():
            if id(operation) not in seen:
                seen.add(id(operation))
                yield prefix + name, operation


def run(operation: AllowedOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs one call, if it is not too large; what it rejects is of no interest."""
    try:
        if operation.size(args, kwargs).effort > MAX_COST:
            return
        operation.call(*args, **kwargs)
    except OP_ERRORS:
        return


def main() -> None:
    """Runs everything."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, operation in operations():
        for dtype, kwargs in itertools.product(DTYPES, KEYWORDS):
            if kwargs and not name.endswith(("div", "divide")):
                continue
            print(name, dtype, kwargs, flush=True)
            for args in operands(dtype):
                run(operation, args, dict(kwargs))
    print("done", flush=True)


if __name__ == "__main__":
    main()
