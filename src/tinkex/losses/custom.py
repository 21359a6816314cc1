"""Losses written in Python: differentiated on the client, applied on the server.

The server returns the logprobs of the targets, the user's function computes a loss from them, and PyTorch computes its
gradient with respect to the logprobs. A cross-entropy weighted with this gradient then has the same gradient with
respect to the model's weights as the user's loss.
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

__all__ = ["CustomLoss", "Surrogate", "data_for_logprobs", "differentiate", "grad_enabled", "require_torch"]

CustomLoss: TypeAlias = (
    "Callable[[list[Datum], list[torch.Tensor]], tuple[torch.Tensor, Mapping[str, float]]]"
)
"""Takes the data and the logprobs of each datum's targets; returns the loss and any metrics."""

SURROGATE: Final = "cross_entropy"


@dataclass(frozen=True)
class Surrogate:
    """The server-side replacement of a custom loss: cross-entropy on ``data`` has the same gradient."""

    data: list[Datum]
    loss: float
    metrics: Mapping[str, float]

    def finish(self, output: ForwardBackwardOutput) -> ForwardBackwardOutput:
        """Returns the server's output with the custom loss as ``loss:sum`` and the surrogate's as a metric of its own."""
        metrics = dict(output.metrics)
        surrogate_loss = metrics.pop("loss:sum", None)
        metrics.update(self.metrics)
        metrics["loss:sum"] = self.loss
        if surrogate_loss is not None:
            metrics["surrogate_loss:sum"] = surrogate_loss
        return replace(output, metrics=metrics)


def require_torch() -> Any:
    """Returns the torch module; raises ``SetupError`` if it is not installed."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise SetupError(
            "forward_backward_custom differentiates your function with PyTorch, which is not installed; "
            "install it with: pip install torch"
        ) from error
    return torch


def data_for_logprobs(data: Sequence[Datum]) -> list[Datum]:
    """Returns the data of the first pass, which computes only the logprobs of the targets.

    >>> from tinkex.types import ModelInput
    >>> datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "rewards": np.ones(2)})
    >>> sorted(data_for_logprobs([datum])[0].loss_fn_inputs)
    ['target_tokens', 'weights']
    """
    requested = []
    for index, datum in enumerate(data):
        targets = datum.loss_fn_inputs.get("target_tokens")
        if targets is None:
            raise ValueError(
                f"data[{index}] has no target_tokens; a custom loss is a function of their logprobs"
            )
        weights = datum.loss_fn_inputs.get("weights")
        if weights is None:
            weights = TensorData.from_numpy(np.zeros(targets.to_numpy().shape, np.float32))
        requested.append(_with_inputs(datum, {"target_tokens": targets, "weights": weights}))
    return requested


@contextlib.contextmanager
def grad_enabled() -> Iterator[None]:
    """Enables autograd, even inside the program's ``no_grad`` or ``inference_mode``."""
    torch = require_torch()
    with torch.inference_mode(mode=False), torch.enable_grad():
        yield


@grad_enabled()
def differentiate(data: Sequence[Datum], output: ForwardBackwardOutput, loss_fn: CustomLoss) -> Surrogate:
    """Calls the user's function once on the logprobs of a first pass and computes its gradient."""
    torch = require_torch()
    logprobs = [_leaf(index, one, data) for index, one in enumerate(output.loss_fn_outputs)]
    if len(logprobs) != len(data):
        raise APIResponseValidationError(
            None, None, f"the server returned the logprobs of {len(logprobs)} of {len(data)} datums"
        )
    returned = loss_fn(list(data), list(logprobs))
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"a custom loss must return (loss, metrics), such as (loss, {{}}); got {type(returned).__name__}"
        )
    loss, metrics = returned
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TypeError("a custom loss must return its loss as a torch tensor with one value")
    if not loss.requires_grad:
        raise ValueError(
            "the custom loss does not depend on the logprobs, so it has no gradient; "
            "compute it from them with torch operations, without detach(), item() or numpy()"
        )
    value = float(loss.detach())
    if not math.isfinite(value):
        raise ValueError(f"the custom loss is {value}; the accumulated gradient is unchanged")
    for lp in logprobs:
        lp.grad = None  # a loss that called backward() itself has set it, and it would count twice
    # backward() rather than grad(): the user's own parameters in the loss get their gradients as well.
    loss.backward()
    weighted = [
        _with_inputs(
            datum,
            {"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": _gradient_weights(i, lp)},
        )
        for i, (datum, lp) in enumerate(zip(data, logprobs, strict=True))
    ]
    return Surrogate(weighted, value, {str(name): float(number) for name, number in dict(metrics).items()})


def _leaf(index: int, outputs: Mapping[str, TensorData], data: Sequence[Datum]) -> torch.Tensor:
    logprobs = outputs.get("logprobs")
    if logprobs is None or index >= len(data):
        raise APIResponseValidationError(None, None, f"the server returned no logprobs for data[{index}]")
    return logprobs.to_torch().requires_grad_(True)  # noqa: FBT003 - torch's own signature


def _gradient_weights(index: int, logprobs: torch.Tensor) -> TensorData:
    grad = logprobs.grad
    if grad is None:  # the loss does not depend on this datum
        return TensorData.from_numpy(np.zeros(tuple(logprobs.shape), np.float32))
    if not bool(grad.isfinite().all()):
        raise ValueError(
            f"the gradient of the custom loss is not finite for data[{index}]; the accumulated gradient is unchanged"
        )
    weights = -grad  # the server's cross-entropy is Σ −logprob·weight
    return TensorData.from_torch_sparse(weights) if weights.ndim == 2 else TensorData.from_torch(weights)


def _with_inputs(datum: Datum, inputs: dict[str, TensorData]) -> Datum:
    return Datum(
        datum.model_input,
        inputs,
        model_input_spans=datum.model_input_spans,
        loss_fn_input_spans=datum.loss_fn_input_spans,
    )
