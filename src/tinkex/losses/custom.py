"""Losses written in Python: their gradient is computed here, and applied where the model is.

The server gives the logprobs of the targets; the user's function turns them into a loss; PyTorch says how the
loss changes with every logprob. A weighted cross-entropy with exactly these slopes then has, for the model's
weights, the same gradient as the user's loss.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from tinkex.errors import APIResponseValidationError, SetupError
from tinkex.types import Datum, ForwardBackwardOutput, TensorData

if TYPE_CHECKING:
    import torch

__all__ = ["CustomLoss", "Surrogate", "data_for_logprobs", "differentiate", "require_torch", "with_slopes"]

CustomLoss: TypeAlias = (
    "Callable[[list[Datum], list[torch.Tensor]], tuple[torch.Tensor, Mapping[str, float]]]"
)
"""Takes the data and the logprobs of each datum's targets; returns the loss and any metrics."""

SURROGATE: Final = "cross_entropy"


@dataclass(frozen=True)
class Surrogate:
    """What stands in for a custom loss on the server: cross-entropy on ``data`` has the same gradient."""

    data: list[Datum]
    loss: float
    metrics: Mapping[str, float]

    def finish(self, output: ForwardBackwardOutput) -> ForwardBackwardOutput:
        """The server's output with the custom loss as ``loss:sum`` and the surrogate's under its own name."""
        metrics = dict(output.metrics)
        surrogate_loss = metrics.pop("loss:sum", None)
        metrics.update(self.metrics)
        metrics["loss:sum"] = self.loss
        if surrogate_loss is not None:
            metrics["surrogate_loss:sum"] = surrogate_loss
        return replace(output, metrics=metrics)


def require_torch() -> Any:
    """The torch module, or a ``SetupError`` that says how to get it."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise SetupError(
            "forward_backward_custom differentiates your function with PyTorch, which is not installed; "
            "install it with: pip install torch"
        ) from error
    return torch


def data_for_logprobs(data: Sequence[Datum]) -> list[Datum]:
    """The data of the first pass, which only asks for the logprobs of the targets.

    >>> from tinkex.types import ModelInput
    >>> datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "rewards": np.ones(2)})
    >>> sorted(data_for_logprobs([datum])[0].loss_fn_inputs)
    ['target_tokens', 'weights']
    """
    asked = []
    for index, datum in enumerate(data):
        targets = datum.loss_fn_inputs.get("target_tokens")
        if targets is None:
            raise ValueError(
                f"data[{index}] has no target_tokens; a custom loss is a function of the logprobs of these"
            )
        weights = datum.loss_fn_inputs.get("weights")
        if weights is None:
            weights = TensorData.from_numpy(np.zeros(targets.to_numpy().shape, np.float32))
        asked.append(_with_inputs(datum, {"target_tokens": targets, "weights": weights}))
    return asked


@contextlib.contextmanager
def with_slopes() -> Iterator[None]:
    """Has torch keep track of gradients, whatever the program around has switched off for its own work."""
    torch = require_torch()
    with torch.inference_mode(mode=False), torch.enable_grad():
        yield


@with_slopes()
def differentiate(data: Sequence[Datum], output: ForwardBackwardOutput, loss_fn: CustomLoss) -> Surrogate:
    """Calls the user's function once on the logprobs of a first pass and takes its gradient."""
    torch = require_torch()
    logprobs = [_leaf(index, one, data) for index, one in enumerate(output.loss_fn_outputs)]
    if len(logprobs) != len(data):
        raise APIResponseValidationError(
            None, None, f"the server returned the logprobs of {len(logprobs)} of {len(data)} datums"
        )
    returned = loss_fn(list(data), list(logprobs))
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"a custom loss returns (loss, metrics), such as (loss, {{}}); got {type(returned).__name__}"
        )
    loss, metrics = returned
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TypeError("the loss a custom loss returns is a torch tensor with one value")
    if not loss.requires_grad:
        raise ValueError(
            "the custom loss does not depend on the logprobs it was given, so it has no gradient; "
            "compute it from them with torch operations, without detach(), item() or numpy()"
        )
    value = float(loss.detach())
    if not math.isfinite(value):
        raise ValueError(f"the custom loss is {value}; nothing was added to the gradient")
    for lp in logprobs:
        lp.grad = None  # a loss that called backward() itself has left its own there, which would count twice
    # backward() rather than grad(): parameters of the user's own in the loss get their gradients as well.
    loss.backward()
    weighted = [
        _with_inputs(
            datum, {"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": _slopes(i, lp)}
        )
        for i, (datum, lp) in enumerate(zip(data, logprobs, strict=True))
    ]
    return Surrogate(weighted, value, {str(name): float(number) for name, number in dict(metrics).items()})


def _leaf(index: int, outputs: Mapping[str, TensorData], data: Sequence[Datum]) -> torch.Tensor:
    logprobs = outputs.get("logprobs")
    if logprobs is None or index >= len(data):
        raise APIResponseValidationError(None, None, f"the server returned no logprobs for data[{index}]")
    return logprobs.to_torch().requires_grad_(True)  # noqa: FBT003 - torch's own signature


def _slopes(index: int, logprobs: torch.Tensor) -> TensorData:
    grad = logprobs.grad
    if grad is None:  # the loss left this datum out: it pulls in no direction
        return TensorData.from_numpy(np.zeros(tuple(logprobs.shape), np.float32))
    if not bool(grad.isfinite().all()):
        raise ValueError(
            f"the gradient of the custom loss is not finite for data[{index}]; nothing was added to the gradient"
        )
    slopes = -grad
    return TensorData.from_torch_sparse(slopes) if slopes.ndim == 2 else TensorData.from_torch(slopes)


def _with_inputs(datum: Datum, inputs: dict[str, TensorData]) -> Datum:
    return Datum(
        datum.model_input,
        inputs,
        model_input_spans=datum.model_input_spans,
        loss_fn_input_spans=datum.loss_fn_input_spans,
    )
