"""The attributes of the spans of a client's operations: ids, counts and parameters, never data."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex import types
from tinkex._runtime import AwaitableConcurrentFuture, background
from tinkex.observability.tracing import OperationSpan, Value, current, start_operation, use_operation

if TYPE_CHECKING:
    from tinkex.clients.session import OpenSession, Session

__all__ = ["follow", "note_sampled", "note_submitted", "sampling_span", "spanning"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def follow(
    session: Session, operation: OperationSpan | None, coroutine: Coroutine[Any, Any, T]
) -> AwaitableConcurrentFuture[T]:
    """Starts a coroutine of a client in the span of an operation, if there is one; the span ends with it."""
    callbacks = session.caller.done_callbacks
    if operation is None:
        return background().submit(coroutine, None, callbacks)
    with operation.activate():
        return background().submit(coroutine, operation.end, callbacks)


def note_submitted(opened: OpenSession, values: Sequence[Any], seq_ids: Sequence[int]) -> None:
    """Adds the attributes of a submission to the span of the current operation, if there is one."""
    operation = current()
    if operation is not None:
        facts = _facts(values)
        operation.set_attributes({"session.id": opened.session_id, "tinkex.seq_ids": tuple(seq_ids), **facts})


def sampling_span(
    name: str, session: Session, opened: OpenSession, request: types.SampleRequest
) -> OperationSpan | None:
    """Starts the span of a sample; None if nothing is traced."""
    operation = start_operation(name, on=session.caller.config.tracing)
    if operation is not None:
        params = request.sampling_params
        operation.set_attributes(
            {
                "session.id": opened.session_id,
                "tinkex.sampling_session_id": request.sampling_session_id,
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.choice.count": request.num_samples,
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.usage.input_tokens": _length([request.prompt]),
            }
        )
    return operation


def note_sampled(response: types.SampleResponse) -> None:
    """Adds the attributes of a result to the span of the current operation, if there is one."""
    operation = current()
    if operation is not None:
        drawn = response.sequences
        operation.set_attributes(
            {
                "gen_ai.usage.output_tokens": sum(len(sequence.tokens) for sequence in drawn),
                "gen_ai.response.finish_reasons": tuple(sequence.stop_reason for sequence in drawn),
            }
        )


def spanning(name: str) -> Callable[[F], F]:
    """Traces a method of several operations as one span: theirs are its children, and it ends with them."""

    def decorate(method: F) -> F:
        if inspect.iscoroutinefunction(method):

            @functools.wraps(method)
            async def call_async(self: Any, *args: Any, **options: Any) -> Any:
                operation = start_operation(name, on=self.holder.caller.config.tracing)
                with use_operation(operation):
                    future = await method(self, *args, **options)
                if operation is not None:
                    operation.end_with_children()
                return future

            return call_async  # type: ignore[return-value]

        @functools.wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            operation = start_operation(name, on=self.holder.caller.config.tracing)
            with use_operation(operation):
                future = method(self, *args, **options)
            if operation is not None:
                operation.end_with_children()
            return future

        return call  # type: ignore[return-value]

    return decorate


def _facts(values: Sequence[Any]) -> dict[str, Value | None]:
    first = values[0]
    facts: dict[str, Value | None] = {"tinkex.model_id": getattr(first, "model_id", None)}
    match first:
        case types.ForwardBackwardRequest():
            data = [datum for value in values for datum in value.data]
            facts |= {
                "tinkex.loss_fn": first.loss_fn,
                "tinkex.num_datums": len(data),
                "tinkex.num_tokens": _length([datum.model_input for datum in data]),
                "tinkex.num_requests": len(values),
            }
        case types.OptimStepRequest() if first.adam_params is not None:
            facts["tinkex.learning_rate"] = first.adam_params.learning_rate
        case _:
            pass
    return facts


def _length(inputs: Sequence[types.ModelInput]) -> int | None:
    try:
        return sum(each.length for each in inputs)
    except ValueError:  # the number of tokens of an image is unknown here
        return None
