"""Combines the results of the chunks of one call: outputs in order, metrics by their reduction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tinkex.types import ForwardBackwardOutput, LossFnOutput

__all__ = ["combine", "combine_metrics"]

Reduce = Callable[[Sequence[float], Sequence[int]], float]
"""Reduces the values of one metric, with the number of datums of each, to one value."""


def combine(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """One output for a call that was sent in chunks, as if it had been sent whole."""
    joined: list[LossFnOutput] = []
    for output in outputs:
        joined.extend(output.loss_fn_outputs)
    return ForwardBackwardOutput(
        loss_fn_output_type=outputs[0].loss_fn_output_type,
        loss_fn_outputs=joined,
        metrics=combine_metrics(
            [output.metrics for output in outputs], [len(output.loss_fn_outputs) for output in outputs]
        ),
    )


def combine_metrics(metrics: Sequence[Mapping[str, float]], num_datums: Sequence[int]) -> dict[str, float]:
    """The metrics of all chunks, each reduced as the part of its name after the last colon says.

    No metric is lost: one without a known reduction is averaged over the datums, and one that some chunks lack is
    reduced over the chunks that have it.

    >>> combine_metrics([{"loss:sum": 1.0, "kl": 0.5}, {"loss:sum": 2.0, "kl": 2.0, "n:max": 3.0}], [1, 2])
    {'loss:sum': 3.0, 'kl': 1.5, 'n:max': 3.0}
    """
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for chunk in metrics for name in chunk):
        present = [
            (chunk[name], count) for chunk, count in zip(metrics, num_datums, strict=True) if name in chunk
        ]
        values, counts = [value for value, _ in present], [count for _, count in present]
        reduction = name.rpartition(":")[2] if ":" in name else ""
        if reduction == "unique":
            combined[name] = values[0]
            combined.update({f"{name}_{place}": value for place, value in enumerate(values[1:], 1)})
        else:
            combined[name] = REDUCTIONS.get(reduction, _mean)(values, counts)
    return combined


def _mean(values: Sequence[float], num_datums: Sequence[int]) -> float:
    if len(values) == 1:  # exact: a product and a quotient could round
        return values[0]
    total = sum(num_datums)
    if total == 0:  # outputs without datums have no weights: every chunk counts the same
        return sum(values) / len(values)
    return sum(value * count for value, count in zip(values, num_datums, strict=True)) / total


def _slack(values: Sequence[float], num_datums: Sequence[int]) -> float:
    return max(values) - _mean(values, num_datums)


def _hash(values: Sequence[float], _: Sequence[int]) -> float:
    # A sum does not depend on the order or the number of chunks, and that of one hash is the hash itself.
    if not all(map(math.isfinite, values)):
        return math.nan
    return sum(int(value) for value in values) % 2**64


REDUCTIONS: Mapping[str, Reduce] = {
    "sum": lambda values, _: sum(values),
    "min": lambda values, _: min(values),
    "max": lambda values, _: max(values),
    "mean": _mean,
    "slack": _slack,
    "hash2": _hash,
    "hash_unordered": _hash,
}
