"""Sampling parameters of the OpenAI protocol as native ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinkex.engine.api.compatible.samples import sampling_params
from tinkex.engine.api.field_errors import InvalidField
from tinkex.engine.api.openai.requests import SamplingFields
from tinkex.engine.sampler.job import MAX_BIASED_TOKENS
from tinkex.types import SamplingParams, StructuredOutput


def native_params(
    request: SamplingFields, *, max_tokens: int | None, stop: str | Sequence[str | int] | None, **more: Any
) -> SamplingParams:
    """The native parameters of a request; raises :class:`InvalidField`."""
    if request.stream_options is not None and not request.stream:
        raise InvalidField("stream_options", "stream_options needs stream; set stream, or remove it.")
    if request.stop == "" or (isinstance(request.stop, list) and "" in request.stop):
        raise InvalidField("stop", "stop has an empty string, which would stop immediately; remove it.")
    return sampling_params(
        max_tokens=max_tokens,
        seed=request.seed,
        stop=stop or None,  # an empty list is OpenAI's default, and never stops in the native API
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        # A value that changes nothing is not passed on, so that it costs nothing.
        min_p=request.min_p or None,
        presence_penalty=request.presence_penalty or None,
        frequency_penalty=request.frequency_penalty or None,
        repetition_penalty=None if request.repetition_penalty == 1 else request.repetition_penalty,
        logit_bias=_logit_bias(request.logit_bias),
        **more,
    )


def structured_output(request: SamplingFields) -> StructuredOutput | None:
    """The form of the answer that a request gives by itself; raises :class:`InvalidField`."""
    form = request.structured_output
    if form is None:
        return None
    try:
        return StructuredOutput(json_schema=form.json_schema, regex=form.regex, grammar=form.grammar)
    except ValueError as error:
        message = "structured_output" + str(error).removeprefix("StructuredOutput")
        raise InvalidField("structured_output", message) from error


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    if len(given) > MAX_BIASED_TOKENS:  # converting more would delay the requests of others
        raise InvalidField(
            "logit_bias",
            f"logit_bias has {len(given)} tokens, and at most {MAX_BIASED_TOKENS} are supported; give fewer.",
        )
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise InvalidField(
            "logit_bias", "logit_bias has a key that is not a token id; use the model's token ids as keys."
        ) from None


def check_number(field: str, value: int | None, low: int, high: int, default: int = 0) -> int:
    """The value of a field, or its default; raises :class:`InvalidField` if it is out of range.

    >>> check_number("n", None, 1, 8, default=1), check_number("n", 4, 1, 8)
    (1, 4)
    """
    if value is None:
        return default
    if not low <= value <= high:
        raise InvalidField(field, f"{field} is {value}; give {low} to {high}.")
    return value
