"""A loss and the regularizers added to it, as one loss.

Each term is computed on the same logprobs; its value and the length of its gradient are reported, and the sum
is what is differentiated. Terms that wait for something run in threads beside the rest; the others are a few
tensor operations, for which a thread costs more than it saves, and run one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import math
import threading
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tinkex.losses.custom import CustomLoss, with_slopes
from tinkex.losses.regularizers.positions import as_tensor
from tinkex.observability.events import RegularizerFinished, RegularizerStarted, Silent, guarded
from tinkex.types import Datum
from tinkex.types.regularizers import CustomLossOutput, RegularizerOutput, RegularizerSpec

if TYPE_CHECKING:
    import torch

    from tinkex.observability.events import Sink

__all__ = ["Pipeline", "with_regularizers"]

WAIT_S = 30.0


def with_regularizers(
    loss_fn: CustomLoss,
    regularizers: Sequence[RegularizerSpec],
    *,
    timeout_s: float = WAIT_S,
    events: Sink | None = None,
) -> CustomLoss:
    """A loss that is ``loss_fn`` plus the weighted regularizers, for ``forward_backward_custom`` of any client.

    >>> import torch
    >>> from tinkex import types
    >>> from tinkex.losses.regularizers import L2
    >>> def nll(data, logprobs):
    ...     return -sum(lp.sum() for lp in logprobs), {}
    >>> loss = with_regularizers(nll, [types.RegularizerSpec(L2(), weight=0.5)])
    >>> datum = types.Datum(types.ModelInput.from_ints([1]), {"target_tokens": [2]})
    >>> total, metrics = loss([datum], [torch.tensor([-2.0], requires_grad=True)])
    >>> float(total.detach()), metrics["regularizer/l2/grad_norm:mean"]
    (4.0, 4.0)
    """
    return Pipeline(regularizers, timeout_s=timeout_s, events=events).around(loss_fn)


class Pipeline:
    """Named, weighted regularizers to add to losses.

    Names must differ, for each is reported under its own. ``timeout_s`` bounds those that wait: after it the
    pass fails with ``TimeoutError`` and nothing is added to the gradient. ``events`` hears of every term when it
    starts and when it is known.
    """

    def __init__(
        self,
        regularizers: Sequence[RegularizerSpec],
        *,
        timeout_s: float = WAIT_S,
        events: Sink | None = None,
    ) -> None:
        for spec in regularizers:
            if not isinstance(spec, RegularizerSpec):
                raise TypeError(
                    f"regularizers are RegularizerSpec(fn, weight=…), got {type(spec).__name__}; for a built-in one "
                    "write RegularizerSpec(L2(), weight=0.01)"
                )
        names = [spec.name for spec in regularizers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two regularizers are called {name!r}; give each its own name=…")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is above 0, got {timeout_s!r}")
        self.regularizers = tuple(regularizers)
        self._timeout_s = timeout_s
        self._events: Sink = guarded(events or Silent())

    def around(self, loss_fn: CustomLoss) -> CustomLoss:
        """The loss with these regularizers added; its metrics tell them apart."""

        def regularized(
            data: list[Datum], logprobs: list[torch.Tensor]
        ) -> tuple[torch.Tensor, dict[str, float]]:
            total, output = self._compute(data, logprobs, loss_fn)
            return total, output.metrics()

        return regularized

    def evaluate(
        self, data: Sequence[Datum], logprobs: Sequence[Any], loss_fn: CustomLoss
    ) -> CustomLossOutput:
        """What the loss and each regularizer are on these logprobs: tensors, or anything torch can read."""
        with with_slopes():
            leaves = [as_tensor(lp).detach().clone().requires_grad_(True) for lp in logprobs]  # noqa: FBT003 - torch's own signature
            return self._compute(list(data), leaves, loss_fn)[1]

    def _compute(
        self, data: list[Datum], logprobs: list[torch.Tensor], loss_fn: CustomLoss
    ) -> tuple[torch.Tensor, CustomLossOutput]:
        began = time.monotonic()
        waiting: dict[str, Future[tuple[torch.Tensor, dict[str, float]]]] = {}
        untold: dict[str, RegularizerSpec] = {}
        try:
            for spec in self.regularizers:
                if _waits(spec):
                    self._events.emit(RegularizerStarted(spec.name, spec.weight))
                    waiting[spec.name] = _in_thread(spec, data, logprobs, self._timeout_s)
                    untold[spec.name] = spec
            return self._add_up(data, logprobs, loss_fn, began, waiting, untold)
        except BaseException:
            for spec in untold.values():
                elapsed_s, why = time.monotonic() - began, "given up: another part of the loss failed"
                self._events.emit(RegularizerFinished(spec.name, spec.weight, elapsed_s, error=why))
            raise

    def _add_up(
        self,
        data: list[Datum],
        logprobs: list[torch.Tensor],
        loss_fn: CustomLoss,
        began: float,
        waiting: Mapping[str, Future[tuple[torch.Tensor, dict[str, float]]]],
        untold: dict[str, RegularizerSpec],
    ) -> tuple[torch.Tensor, CustomLossOutput]:
        base, base_metrics = _checked("the loss", loss_fn(list(data), list(logprobs)))
        total, terms, pull = base, {}, _slope(base, logprobs)
        base_grad_norm = _norm(pull)
        for spec in self.regularizers:
            untold.pop(spec.name, None)
            with self._told(spec, since=began if spec.name in waiting else None) as known:
                if spec.name in waiting:
                    left_s = max(0.0, self._timeout_s - (time.monotonic() - began))
                    value, metrics = _result(spec, waiting[spec.name], left_s, self._timeout_s)
                else:
                    value, metrics = _noted(spec, data, logprobs)
                number, slope = _number(spec.name, value), _slope(value, logprobs)
                grad_norm = _norm(slope)
                if not math.isfinite(grad_norm):
                    raise ValueError(
                        f"the gradient of the regularizer {spec.name!r} is not finite, though its value is {number:g}; "
                        "nothing was added to the gradient"
                    )
                known.extend((number, grad_norm))
            terms[spec.name] = RegularizerOutput(spec.name, number, float(spec.weight), known[1], metrics)
            total, pull = total + spec.weight * value, pull + spec.weight * slope
        output = CustomLossOutput(
            base_loss=float(base.detach()),
            base_grad_norm=base_grad_norm,
            total_grad_norm=_norm(pull),
            regularizers=terms,
            base_metrics=base_metrics,
        )
        return total, output

    @contextlib.contextmanager
    def _told(self, spec: RegularizerSpec, since: float | None) -> Iterator[list[float]]:
        """Tells of a term; the block adds its value and the length of its gradient to the list."""
        if since is None:
            since = time.monotonic()
            self._events.emit(RegularizerStarted(spec.name, spec.weight))
        known: list[float] = []
        try:
            yield known
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            elapsed_s = time.monotonic() - since
            self._events.emit(RegularizerFinished(spec.name, spec.weight, elapsed_s, error=text))
            raise
        value, grad_norm = known
        self._events.emit(
            RegularizerFinished(spec.name, spec.weight, time.monotonic() - since, value, grad_norm)
        )


def _waits(spec: RegularizerSpec) -> bool:
    called = getattr(type(spec.fn), "__call__", None)  # noqa: B004 - the method of an object that is called
    return spec.waits or inspect.iscoroutinefunction(spec.fn) or inspect.iscoroutinefunction(called)


def _noted(
    spec: RegularizerSpec, data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    try:
        return _checked(f"the regularizer {spec.name!r}", spec.fn(list(data), list(logprobs)))
    except Exception as error:
        error.add_note(f"raised by the regularizer {spec.name!r}; nothing was added to the gradient")
        raise


def _in_thread(
    spec: RegularizerSpec, data: Sequence[Datum], logprobs: Sequence[torch.Tensor], timeout_s: float
) -> Future[tuple[torch.Tensor, dict[str, float]]]:
    """Starts a term in a thread of its own; a daemon, so that one that never returns does not hold the program."""
    future: Future[tuple[torch.Tensor, dict[str, float]]] = Future()

    def work() -> None:
        try:
            returned = spec.fn(list(data), list(logprobs))
            if inspect.isawaitable(returned):
                returned = asyncio.run(_within(returned, timeout_s))
            future.set_result(_checked(f"the regularizer {spec.name!r}", returned))
        except BaseException as error:  # noqa: BLE001 - nothing is hidden: whoever waits for the term gets it
            error.add_note(f"raised by the regularizer {spec.name!r}; nothing was added to the gradient")
            future.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), name=f"regularizer {spec.name}", daemon=True).start()
    return future


class _Late(TimeoutError):
    """Our patience is over, not that of something the term waits for itself."""


async def _within(returned: Awaitable[Any], timeout_s: float) -> Any:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await returned
    except TimeoutError as error:
        raise (_Late() if limit.expired() else error) from error


def _result(
    spec: RegularizerSpec,
    future: Future[tuple[torch.Tensor, dict[str, float]]],
    left_s: float,
    timeout_s: float,
) -> tuple[torch.Tensor, dict[str, float]]:
    try:
        return future.result(min(left_s, threading.TIMEOUT_MAX))
    except TimeoutError as error:
        if future.done() and not isinstance(error, _Late):
            raise
        raise TimeoutError(
            f"the regularizer {spec.name!r} had no value after {timeout_s:g} s; nothing was added to the gradient. "
            "Give it more time with with_regularizers(…, timeout_s=…)"
        ) from error


def _checked(who: str, returned: Any) -> tuple[torch.Tensor, dict[str, float]]:
    import torch

    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"{who} returns (value, metrics), such as (value, {{}}); got {type(returned).__name__}"
        )
    value, metrics = returned
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise TypeError(f"the value that {who} returns is a torch tensor with one number")
    return value.reshape(()), {str(name): _plain(number) for name, number in dict(metrics).items()}


def _plain(number: Any) -> float:
    return float(number.detach() if hasattr(number, "detach") else number)


def _number(name: str, value: torch.Tensor) -> float:
    if not value.requires_grad:
        raise ValueError(
            f"the regularizer {name!r} does not depend on the logprobs, so it would change the reported loss and "
            "nothing else; compute it from them with torch operations, without detach(), item() or numpy()"
        )
    number = float(value.detach())
    if not math.isfinite(number):
        raise ValueError(f"the regularizer {name!r} is {number}; nothing was added to the gradient")
    return number


def _slope(value: torch.Tensor, logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The gradient over all logprobs, as one vector in float64; the graph stays for the pass itself."""
    import torch

    if not value.requires_grad:
        return torch.zeros(sum(lp.numel() for lp in logprobs), dtype=torch.float64)
    slopes = torch.autograd.grad(
        value, list(logprobs), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return torch.cat([slope.reshape(-1) for slope in slopes]).double()


def _norm(slope: torch.Tensor) -> float:
    return float(slope.square().sum().sqrt())
