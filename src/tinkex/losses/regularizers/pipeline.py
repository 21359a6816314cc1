"""A loss and the regularizers added to it, as one loss.

Each term is computed on the same logprobs; its value and gradient norm are reported, and the sum is differentiated.
Terms that wait for I/O run concurrently in threads; the others are a few tensor operations, for which a thread costs
more than it saves, and run sequentially.
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

from tinkex.losses.custom import CustomLoss, grad_enabled
from tinkex.losses.regularizers.positions import as_tensor, check_data, check_output
from tinkex.observability.events import NullSink, RegularizerFinished, RegularizerStarted, guard
from tinkex.observability.process import bus_for
from tinkex.types import Datum
from tinkex.types.regularizers import CustomLossOutput, RegularizerOutput, RegularizerSpec

if TYPE_CHECKING:
    import torch

    from tinkex.observability.events import Sink

__all__ = ["Pipeline", "with_regularizers"]

DEFAULT_TIMEOUT_S = 30.0


def with_regularizers(
    loss_fn: CustomLoss,
    regularizers: Sequence[RegularizerSpec],
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    events: Sink | None = None,
) -> CustomLoss:
    """Returns ``loss_fn`` plus the weighted ``regularizers`` as one loss, for ``forward_backward_custom`` of any client.

    ``timeout_s`` and ``events`` are those of :class:`Pipeline`.

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
    """Named, weighted ``regularizers`` to add to losses.

    Names must be unique: each is a prefix of its term's metrics. ``timeout_s`` limits terms that wait for I/O: after
    it the pass fails with ``TimeoutError`` and leaves the gradient unchanged. ``events`` receives an event when each
    term starts and finishes.

    >>> from tinkex.losses.regularizers import L2
    >>> [spec.name for spec in Pipeline([RegularizerSpec(L2(), weight=0.5)]).regularizers]
    ['l2']
    """

    def __init__(
        self,
        regularizers: Sequence[RegularizerSpec],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        events: Sink | None = None,
    ) -> None:
        for spec in regularizers:
            if not isinstance(spec, RegularizerSpec):
                raise TypeError(
                    f"regularizers must be RegularizerSpec(fn, weight=…), got {type(spec).__name__}; for a built-in one "
                    "write RegularizerSpec(L2(), weight=0.01)"
                )
        names = [spec.name for spec in regularizers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two regularizers are named {name!r}; give each its own name=…")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s!r}")
        self.regularizers = tuple(regularizers)
        self._timeout_s = timeout_s
        self._events: Sink = bus_for(events or NullSink(), guard)

    def around(self, loss_fn: CustomLoss) -> CustomLoss:
        """Returns ``loss_fn`` with these regularizers added; its metrics list each of them.

        ::

            loss = Pipeline([types.RegularizerSpec(L2(), weight=0.01)]).around(nll)
            training.forward_backward_custom(batch, loss).result()
        """

        def regularized(
            data: list[Datum], logprobs: list[torch.Tensor]
        ) -> tuple[torch.Tensor, dict[str, float]]:
            total, output = self._compute(data, logprobs, loss_fn)
            return total, output.metrics()

        return regularized

    def evaluate(
        self, data: Sequence[Datum], logprobs: Sequence[Any], loss_fn: CustomLoss
    ) -> CustomLossOutput:
        """Evaluates ``loss_fn`` and each regularizer on ``logprobs``, one tensor, array or list per datum of ``data``.

        >>> from tinkex.losses.regularizers import L2
        >>> from tinkex.types import ModelInput
        >>> def nll(data, logprobs):
        ...     return -sum(lp.sum() for lp in logprobs), {}
        >>> datum = Datum(ModelInput.from_ints([1]), {"target_tokens": [2]})
        >>> Pipeline([RegularizerSpec(L2(), weight=0.5)]).evaluate([datum], [[-2.0]], nll).loss_total
        4.0
        """
        check_data(data)
        with grad_enabled():
            leaves = [as_tensor(lp).detach().clone().requires_grad_(True) for lp in logprobs]  # noqa: FBT003 - torch's own signature
            return self._compute(list(data), leaves, loss_fn)[1]

    def _compute(
        self, data: list[Datum], logprobs: list[torch.Tensor], loss_fn: CustomLoss
    ) -> tuple[torch.Tensor, CustomLossOutput]:
        began = time.monotonic()
        waiting: dict[str, Future[tuple[torch.Tensor, dict[str, float]]]] = {}
        unreported: dict[str, RegularizerSpec] = {}
        try:
            for spec in self.regularizers:
                if _runs_in_thread(spec):
                    self._events.emit(RegularizerStarted(spec.name, spec.weight))
                    waiting[spec.name] = _start_thread(spec, data, logprobs, self._timeout_s)
                    unreported[spec.name] = spec
            return self._add_up(data, logprobs, loss_fn, began, waiting, unreported)
        except BaseException:
            for spec in unreported.values():
                elapsed_s, why = time.monotonic() - began, "cancelled: another term of the loss failed"
                self._events.emit(RegularizerFinished(spec.name, spec.weight, elapsed_s, error=why))
            raise

    def _add_up(
        self,
        data: list[Datum],
        logprobs: list[torch.Tensor],
        loss_fn: CustomLoss,
        began: float,
        waiting: Mapping[str, Future[tuple[torch.Tensor, dict[str, float]]]],
        unreported: dict[str, RegularizerSpec],
    ) -> tuple[torch.Tensor, CustomLossOutput]:
        base, base_metrics = check_output("the loss", loss_fn(list(data), list(logprobs)))
        total, terms, gradient = base, {}, _gradient(base, logprobs)
        base_grad_norm = _norm(gradient)
        for spec in self.regularizers:
            unreported.pop(spec.name, None)
            with self._reported(spec, since=began if spec.name in waiting else None) as known:
                if spec.name in waiting:
                    left_s = max(0.0, self._timeout_s - (time.monotonic() - began))
                    value, metrics = _result(spec, waiting[spec.name], left_s, self._timeout_s)
                else:
                    value, metrics = _evaluate(spec, data, logprobs)
                number, slope = _number(spec.name, value), _gradient(value, logprobs)
                grad_norm = _norm(slope)
                if not math.isfinite(grad_norm):
                    raise ValueError(
                        f"the gradient of the regularizer {spec.name!r} is not finite, though its value is {number:g}; "
                        "the accumulated gradient is unchanged"
                    )
                known.extend((number, grad_norm))
            terms[spec.name] = RegularizerOutput(spec.name, number, float(spec.weight), known[1], metrics)
            total, gradient = total + spec.weight * value, gradient + spec.weight * slope
        output = CustomLossOutput(
            base_loss=float(base.detach()),
            base_grad_norm=base_grad_norm,
            total_grad_norm=_norm(gradient),
            regularizers=terms,
            base_metrics=base_metrics,
        )
        return total, output

    @contextlib.contextmanager
    def _reported(self, spec: RegularizerSpec, since: float | None) -> Iterator[list[float]]:
        """Emits the events of a term; the block appends its value and gradient norm to the list."""
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


def _runs_in_thread(spec: RegularizerSpec) -> bool:
    called = getattr(type(spec.fn), "__call__", None)  # noqa: B004 - the method of a callable object
    return spec.waits or inspect.iscoroutinefunction(spec.fn) or inspect.iscoroutinefunction(called)


def _evaluate(
    spec: RegularizerSpec, data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    try:
        return check_output(f"the regularizer {spec.name!r}", spec.fn(list(data), list(logprobs)))
    except Exception as error:
        error.add_note(f"raised by the regularizer {spec.name!r}; the accumulated gradient is unchanged")
        raise


def _start_thread(
    spec: RegularizerSpec, data: Sequence[Datum], logprobs: Sequence[torch.Tensor], timeout_s: float
) -> Future[tuple[torch.Tensor, dict[str, float]]]:
    """Starts a term in its own daemon thread, so that one that never returns does not block interpreter exit."""
    future: Future[tuple[torch.Tensor, dict[str, float]]] = Future()

    def work() -> None:
        try:
            returned = spec.fn(list(data), list(logprobs))
            if inspect.isawaitable(returned):
                returned = asyncio.run(_await_with_timeout(returned, timeout_s))
            future.set_result(check_output(f"the regularizer {spec.name!r}", returned))
        except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
            error.add_note(f"raised by the regularizer {spec.name!r}; the accumulated gradient is unchanged")
            future.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), name=f"regularizer {spec.name}", daemon=True).start()
    return future


class _DeadlineExceeded(TimeoutError):
    """The pipeline's timeout expired, not one inside the term."""


async def _await_with_timeout(returned: Awaitable[Any], timeout_s: float) -> Any:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await returned
    except TimeoutError as error:
        raise (_DeadlineExceeded() if limit.expired() else error) from error


def _result(
    spec: RegularizerSpec,
    future: Future[tuple[torch.Tensor, dict[str, float]]],
    left_s: float,
    timeout_s: float,
) -> tuple[torch.Tensor, dict[str, float]]:
    try:
        return future.result(min(left_s, threading.TIMEOUT_MAX))
    except TimeoutError as error:
        if future.done() and not isinstance(error, _DeadlineExceeded):
            raise
        raise TimeoutError(
            f"the regularizer {spec.name!r} timed out after {timeout_s:g} s; the accumulated gradient is unchanged. "
            "Raise the limit with with_regularizers(…, timeout_s=…)"
        ) from error


def _number(name: str, value: torch.Tensor) -> float:
    if not value.requires_grad:
        raise ValueError(
            f"the regularizer {name!r} does not depend on the logprobs, so it would change the reported loss and "
            "nothing else; compute it from them with torch operations, without detach(), item() or numpy()"
        )
    number = float(value.detach())
    if not math.isfinite(number):
        raise ValueError(f"the regularizer {name!r} is {number}; the accumulated gradient is unchanged")
    return number


def _gradient(value: torch.Tensor, logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the gradient with respect to all logprobs, as one float64 vector; retains the graph."""
    import torch

    if not value.requires_grad:
        return torch.zeros(sum(lp.numel() for lp in logprobs), dtype=torch.float64)
    slopes = torch.autograd.grad(
        value, list(logprobs), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return torch.cat([slope.reshape(-1) for slope in slopes]).double()


def _norm(slope: torch.Tensor) -> float:
    return float(slope.square().sum().sqrt())
