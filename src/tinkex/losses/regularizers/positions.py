"""Shared by the regularizers: the selection of positions, constant logprobs, and reduction.

Tensors are named by shape: T positions of a datum, K candidates of a position. A server returns logprobs of shape [T],
one per target, or [T, K] for data with K targets at every position.
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
    "LogprobsSource",
    "Penalty",
    "Reduction",
    "as_tensor",
    "check_data",
    "check_output",
    "concatenated",
    "fixed_logprobs",
    "reduce",
    "select_positions",
    "zero",
]

Logprobs: TypeAlias = "Sequence[torch.Tensor]"
Penalty: TypeAlias = "tuple[torch.Tensor, dict[str, float]]"
Reduction = Literal["mean", "sum"]

LogprobsSource: TypeAlias = "str | Sequence[Any] | Callable[[Sequence[Datum]], Sequence[Any]]"
"""The source of constant logprobs: a name in ``loss_fn_inputs``, one array per datum, or a function of the data."""


def select_positions(
    data: Sequence[Datum], where: str | None, *columns: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, ...]]:
    """Returns the tensors of each datum at the selected positions: all, or those where the named input is not zero."""
    check_data(data)
    if len(data) != len(columns[0]):
        raise ValueError(f"there are {len(data)} datums and the logprobs of {len(columns[0])}")
    per_datum = list(zip(*columns, strict=True))
    if where is None:
        return per_datum
    selected = []
    for index, (datum, tensors) in enumerate(zip(data, per_datum, strict=True)):
        mask = _input(datum, index, where).to_torch() != 0
        shape = tuple(tensors[0].shape)
        if tuple(mask.shape) not in {shape, shape[:1]} or mask.ndim != 1:
            raise ValueError(
                f"{where} of data[{index}] selects positions, so it must have one number for each of the {shape[0]}; "
                f"its shape is {tuple(mask.shape)}"
            )
        selected.append(tuple(tensor[mask] for tensor in tensors))
    return selected


def check_data(data: Sequence[Datum]) -> None:
    """Raises ``ValueError`` for empty data, over which a term has no value and no gradient."""
    if not data:
        raise ValueError("the data is empty; a regularizer needs at least one Datum")


def concatenated(per_datum: Sequence[tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
    """Concatenates the tensors of all datums, for position-wise terms: one operation instead of one per datum.

    Datums with different numbers of candidates are returned as they are.
    """
    import torch

    if len(per_datum) < 2 or len({tensor.shape[1:] for tensors in per_datum for tensor in tensors}) > 1:
        return list(per_datum)
    return [tuple(torch.cat(column) for column in zip(*per_datum, strict=True))]


def fixed_logprobs(
    source: LogprobsSource, data: Sequence[Datum], logprobs: Logprobs, what: str
) -> list[torch.Tensor]:
    """Returns the constant logprobs of every datum; raises ``ValueError`` unless their shapes match the model's."""
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
    """Converts a ``TensorData``, an array or a list to a tensor; read-only arrays are copied."""
    import torch

    if isinstance(values, TensorData):
        return values.to_torch()
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values))


def reduce(values: Sequence[torch.Tensor], logprobs: Logprobs, reduction: Reduction) -> torch.Tensor:
    """Reduces the values of all positions of all datums to one number; zero if there are none."""
    import torch

    everything = torch.cat([value.reshape(-1) for value in values])
    if everything.numel() == 0:
        return zero(logprobs)
    return everything.sum() if reduction == "sum" else everything.mean()


def zero(logprobs: Logprobs) -> torch.Tensor:
    """Returns a zero that depends on the logprobs, so that it has a gradient like every other value."""
    return logprobs[0].reshape(-1)[:0].sum()


def check_reduction(reduction: str) -> None:
    """Raises ``ValueError`` for an unknown reduction."""
    check_choice("reduction", reduction, ("mean", "sum"))


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raises ``ValueError`` for a value that is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")


def check_number(name: str, value: float, *, above: float | None = None) -> None:
    """Raises ``ValueError`` for a value that is not a finite number, or not above a bound."""
    import math

    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    if above is not None and not value > above:
        raise ValueError(f"{name} must be above {above:g}, got {value!r}")


def _input(datum: Datum, index: int, name: str) -> TensorData:
    inputs: Mapping[str, TensorData] = datum.loss_fn_inputs
    if name not in inputs:
        raise ValueError(
            f"data[{index}] has no {name!r} in its loss_fn_inputs ({', '.join(sorted(inputs))}); "
            "add it to every datum, or choose another"
        )
    return inputs[name]


def check_output(name: str, returned: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """Returns the value of a loss or term as a scalar, with its metrics as numbers; raises ``TypeError`` for anything else."""
    import torch

    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"{name} must return (value, metrics), such as (value, {{}}); got {type(returned).__name__}"
        )
    value, metrics = returned
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise TypeError(f"{name} must return its value as a torch tensor with one number")
    return value.reshape(()), {str(name): _plain(number) for name, number in dict(metrics).items()}


def _plain(number: Any) -> float:
    return float(number.detach() if hasattr(number, "detach") else number)
