"""What the regularizers share: the positions they look at, what they compare with, and how they add up.

Tensors are named by shape: T positions of a datum, K candidates of a position. A server gives logprobs of
shape [T], one per target, or [T, K] where the data asks for K targets at every position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from tinkex.types import Datum, TensorData

if TYPE_CHECKING:
    import torch

__all__ = [
    "Logprobs",
    "Penalty",
    "Reduction",
    "Source",
    "aligned",
    "as_tensor",
    "chosen_with",
    "nothing",
    "reduced",
    "together",
]

Logprobs: TypeAlias = "Sequence[torch.Tensor]"
Penalty: TypeAlias = "tuple[torch.Tensor, dict[str, float]]"
Reduction = Literal["mean", "sum"]

Source: TypeAlias = "str | Sequence[Any] | Callable[[Sequence[Datum]], Sequence[Any]]"
"""Where fixed logprobs come from: a name in ``loss_fn_inputs``, one array per datum, or a function of the data."""


def chosen_with(
    data: Sequence[Datum], where: str | None, *columns: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, ...]]:
    """Tensors per datum at the positions that count: all, or those where the named input is not zero."""
    if len(data) != len(columns[0]):
        raise ValueError(f"there are {len(data)} datums and the logprobs of {len(columns[0])}")
    rows = list(zip(*columns, strict=True))
    if where is None:
        return rows
    picked = []
    for index, (datum, row) in enumerate(zip(data, rows, strict=True)):
        mask = _input(datum, index, where).to_torch() != 0
        shape = tuple(row[0].shape)
        if tuple(mask.shape) not in {shape, shape[:1]} or mask.ndim != 1:
            raise ValueError(
                f"{where} of data[{index}] chooses positions, so it has one number for each of the {shape[0]}; "
                f"its shape is {tuple(mask.shape)}"
            )
        picked.append(tuple(column[mask] for column in row))
    return picked


def together(rows: Sequence[tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
    """The rows of all datums as one, for what treats positions alike: one operation instead of one per datum.

    Datums with different numbers of candidates cannot be joined, and stay as they are.
    """
    import torch

    if len(rows) < 2 or len({tensor.shape[1:] for row in rows for tensor in row}) > 1:
        return list(rows)
    return [tuple(torch.cat(column) for column in zip(*rows, strict=True))]


def aligned(source: Source, data: Sequence[Datum], logprobs: Logprobs, what: str) -> list[torch.Tensor]:
    """The fixed logprobs of every datum from wherever they come, checked to be of the shape of the live ones."""
    if isinstance(source, str):
        found: Sequence[Any] = [_input(datum, index, source) for index, datum in enumerate(data)]
    else:
        found = source(data) if callable(source) else source
    if len(found) != len(data):
        raise ValueError(f"{what} has the logprobs of {len(found)} datums; there are {len(data)}")
    fixed = []
    for index, (one, live) in enumerate(zip(found, logprobs, strict=True)):
        tensor = as_tensor(one)
        if tensor.shape != live.shape:
            raise ValueError(
                f"{what} of data[{index}] has the shape {tuple(tensor.shape)}; its logprobs have {tuple(live.shape)}"
            )
        fixed.append(tensor.detach().to(live.dtype))
    return fixed


def as_tensor(values: Any) -> torch.Tensor:
    """A tensor of what may be one already, a ``TensorData``, an array or a list; read-only arrays are copied."""
    import torch

    if isinstance(values, TensorData):
        return values.to_torch()
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values))


def reduced(values: Sequence[torch.Tensor], logprobs: Logprobs, reduction: Reduction) -> torch.Tensor:
    """One number from the values of all positions of all datums; none at all give zero."""
    import torch

    everything = torch.cat([value.reshape(-1) for value in values])
    if everything.numel() == 0:
        return nothing(logprobs)
    return everything.sum() if reduction == "sum" else everything.mean()


def nothing(logprobs: Logprobs) -> torch.Tensor:
    """Zero, as a function of the logprobs, so that it has a gradient like every other value."""
    return logprobs[0].reshape(-1)[:0].sum()


def check_reduction(reduction: str) -> None:
    """Refuses reductions that do not give one number."""
    check_choice("reduction", reduction, ("mean", "sum"))


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuses a value that is not among the choices, naming them."""
    if value not in choices:
        raise ValueError(f"{name} is {' or '.join(map(repr, choices))}; got {value!r}")


def check_number(name: str, value: float, *, above: float | None = None) -> None:
    """Refuses what is not a finite number, or not above a bound."""
    import math

    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is a finite number, got {value!r}")
    if above is not None and not value > above:
        raise ValueError(f"{name} is above {above:g}, got {value!r}")


def _input(datum: Datum, index: int, name: str) -> TensorData:
    inputs: Mapping[str, TensorData] = datum.loss_fn_inputs
    if name not in inputs:
        raise ValueError(
            f"data[{index}] has no {name!r} among its loss_fn_inputs ({', '.join(sorted(inputs))}); "
            "add it to every datum, or name another"
        )
    return inputs[name]
