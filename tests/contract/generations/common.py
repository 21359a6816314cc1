"""Data of the programs, which both generations build in the same way."""

from __future__ import annotations

from typing import Any

from tests.contract.names import BASE_MODEL
from tinkex import types

__all__ = ["ADAM", "BASE_MODEL", "GREEDY", "datum", "loss_of", "prompt", "squared", "tokens_of"]

ADAM = types.AdamParams(learning_rate=1e-3)
GREEDY = types.SamplingParams(max_tokens=3, temperature=0.0)


def datum(shift: int = 0, length: int = 6) -> types.Datum:
    tokens = [(i + shift) % 50 + 5 for i in range(length + 1)]
    return types.Datum(
        types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": [1.0] * length}
    )


def prompt(first: int = 5) -> types.ModelInput:
    return types.ModelInput.from_ints([first, first + 1, first + 2])


def loss_of(output: types.ForwardBackwardOutput) -> float:
    return round(output.metrics["loss:sum"], 4)


def tokens_of(response: types.SampleResponse) -> list[int]:
    return response.sequences[0].tokens


def squared(data: Any, logprobs: Any) -> Any:
    return sum((each**2).sum() for each in logprobs), {"datums": float(len(data))}
