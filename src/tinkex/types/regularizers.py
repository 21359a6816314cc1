"""Regularizers of a loss: names, weights and results."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tinkex.types.inputs import Datum

__all__ = ["CustomLossOutput", "Regularizer", "RegularizerOutput", "RegularizerSpec"]

Regularizer: TypeAlias = Callable[[Sequence[Datum], Sequence[Any]], Any]
"""Takes the data and the logprobs of each datum's targets, torch tensors; returns the penalty and a mapping of metrics.

It may be a coroutine function, which runs on its own event loop."""


@dataclass(frozen=True)
class RegularizerSpec:
    """One named term of a loss: ``weight`` times what ``fn`` returns.

    ``name`` defaults to the function's name. Set ``waits`` if the function waits for I/O, such as a reference model:
    it then runs concurrently with the others.

    >>> def smoothness(data, logprobs):
    ...     return sum((lp**2).sum() for lp in logprobs), {}
    >>> RegularizerSpec(smoothness, weight=0.1).name
    'smoothness'
    """

    fn: Regularizer = field(repr=False)
    weight: float
    name: str = ""
    waits: bool = False

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(
                f"a regularizer must be a function of (data, logprobs), such as tinkex.losses.regularizers.L2(); "
                f"got {type(self.fn).__name__}"
            )
        _check_arity(self.fn)
        if not self.name:
            own = getattr(self.fn, "name", None) or getattr(self.fn, "__name__", "")
            object.__setattr__(self, "name", own)
        if not isinstance(self.name, str) or not self.name:
            raise ValueError("a regularizer needs a name for its metrics, such as name='smooth'")
        if (
            isinstance(self.weight, bool)
            or not isinstance(self.weight, int | float)
            or not (math.isfinite(self.weight) and self.weight >= 0)
        ):
            raise ValueError(
                f"the weight of the regularizer {self.name!r} must be a finite number ≥ 0, got {self.weight!r}"
            )


def _check_arity(fn: Regularizer) -> None:
    """Raises ``TypeError`` for a function that cannot be called with (data, logprobs)."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # a builtin without a signature
    try:
        signature.bind((), ())
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"a regularizer takes two arguments, (data, logprobs); {name}{signature} does not: {error}. Bind other "
            "arguments with functools.partial"
        ) from error


@dataclass(frozen=True)
class RegularizerOutput:
    """The result of one term: its value, contribution to the loss, and gradient norm.

    >>> RegularizerOutput("l2", value=4.0, weight=0.5, grad_norm=6.0).contribution
    2.0
    """

    name: str
    value: float
    weight: float
    grad_norm: float
    """The gradient norm of the unweighted value with respect to all logprobs."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def contribution(self) -> float:
        """The term's contribution to the loss."""
        return self.weight * self.value

    @property
    def grad_norm_weighted(self) -> float:
        """The gradient norm of the term's contribution."""
        return self.weight * self.grad_norm

    def model_dump(self) -> dict[str, Any]:
        """Returns a plain dictionary, ready for JSON; the term's own metrics are under ``custom``."""
        return {
            "name": self.name,
            "value": self.value,
            "weight": self.weight,
            "contribution": self.contribution,
            "grad_norm": self.grad_norm,
            "grad_norm_weighted": self.grad_norm_weighted,
            "custom": dict(self.metrics),
        }


@dataclass(frozen=True)
class CustomLossOutput:
    """A loss and the terms added to it, each with its value and gradient norm.

    >>> l2 = RegularizerOutput("l2", value=4.0, weight=0.5, grad_norm=6.0)
    >>> CustomLossOutput(base_loss=1.0, base_grad_norm=1.0, regularizers={"l2": l2}, total_grad_norm=3.5).loss_total
    3.0
    """

    base_loss: float
    base_grad_norm: float
    total_grad_norm: float
    regularizers: Mapping[str, RegularizerOutput] = field(default_factory=dict)
    base_metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def regularizer_total(self) -> float:
        """The contribution of all terms to the loss."""
        return sum(term.contribution for term in self.regularizers.values())

    @property
    def loss_total(self) -> float:
        """The loss with all terms added."""
        return self.base_loss + self.regularizer_total

    def model_dump(self) -> dict[str, Any]:
        """Returns a plain dictionary, ready for JSON.

        >>> CustomLossOutput(base_loss=1.0, base_grad_norm=2.0, total_grad_norm=2.0).model_dump()["base_loss"]
        {'value': 1.0, 'grad_norm': 2.0, 'custom': {}}
        """
        return {
            "loss_total": self.loss_total,
            "base_loss": {
                "value": self.base_loss,
                "grad_norm": self.base_grad_norm,
                "custom": dict(self.base_metrics),
            },
            "regularizers": {name: term.model_dump() for name, term in self.regularizers.items()},
            "regularizer_total": self.regularizer_total,
            "total_grad_norm": self.total_grad_norm,
        }

    def metrics(self) -> dict[str, float]:
        """Returns flat metrics, as in the output of a pass.

        The user's metrics keep their names; those of a term have the prefix ``regularizer/<name>/``.
        """
        flat = dict(self.base_metrics)
        for name, term in self.regularizers.items():
            head = f"regularizer/{name}"
            flat |= {f"{head}/{key}": value for key, value in term.metrics.items()}
            flat[f"{head}/value:sum"] = term.value
            flat[f"{head}/contribution:sum"] = term.contribution
            flat[f"{head}/grad_norm:mean"] = term.grad_norm
        flat["base_loss:sum"] = self.base_loss
        flat["base_loss/grad_norm:mean"] = self.base_grad_norm
        flat["regularizer_loss:sum"] = self.regularizer_total
        flat["loss/grad_norm:mean"] = self.total_grad_norm
        return flat
