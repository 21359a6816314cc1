"""Validates arguments before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from tinkex.errors import Unsupported
from tinkex.types import (
    ClientConfigResponse,
    Datum,
    ImageAssetPointerChunk,
    LossFnType,
    ModelInput,
    SampleRequest,
    SamplingParams,
)
from tinkex.types.coercion import as_float, as_int

__all__ = [
    "check_data",
    "check_loss",
    "check_name",
    "check_offered",
    "check_prompt_options",
    "check_sample",
    "check_ttl",
]

MAX_NAME_CHARS = 200
LOSSES: tuple[str, ...] = get_args(LossFnType)


def check_name(name: str) -> None:
    """Rejects names that cannot be part of a checkpoint's path."""
    if not isinstance(name, str) or not name or len(name) > MAX_NAME_CHARS or set(name) & set("/?#\\ "):
        raise ValueError(
            f"a checkpoint name is 1–{MAX_NAME_CHARS} characters without slashes, spaces, '?' or '#'; got {name!r}"
        )


def check_ttl(ttl_seconds: int | None) -> None:
    """Rejects lifetimes that are not positive."""
    if ttl_seconds is not None and as_int(ttl_seconds, "ttl_seconds") <= 0:
        raise ValueError(
            f"ttl_seconds is the lifetime of the checkpoint in seconds, and positive; got {ttl_seconds}"
        )


def check_data(data: Iterable[Datum]) -> list[Datum]:
    """Returns the datums as a new list; rejects everything but datums that can be trained on."""
    if isinstance(data, Datum) or not isinstance(data, Iterable):
        raise TypeError(
            f"the data is a list of Datum, got {type(data).__name__}; put a single one into a list"
        )
    data = list(data)
    if not data:
        raise ValueError("the data is empty; a pass needs at least one Datum")
    for index, datum in enumerate(data):
        if not isinstance(datum, Datum):
            raise TypeError(f"data[{index}] is a {type(datum).__name__}; every item must be a Datum")
        if any(isinstance(chunk, ImageAssetPointerChunk) for chunk in datum.model_input.chunks):
            raise ValueError(
                f"data[{index}] refers to an image by its location, which cannot be trained on; "
                "send the image itself as an ImageChunk"
            )
    return data


def check_loss(
    loss_fn: str, loss_fn_config: Mapping[str, float | str] | None
) -> dict[str, float | str] | None:
    """Returns a copy of the loss's configuration; rejects a name or configuration that cannot be sent."""
    if not isinstance(loss_fn, str) or not loss_fn:
        raise TypeError(f"loss_fn is the name of a loss such as 'cross_entropy', got {loss_fn!r}")
    if loss_fn not in LOSSES:
        raise ValueError(f"unknown loss {loss_fn!r}; known: {', '.join(LOSSES)}")
    if loss_fn_config is None:
        return None
    if not isinstance(loss_fn_config, Mapping):
        raise TypeError(
            f"loss_fn_config is a mapping such as {{'clip_low_threshold': 0.8}}, got {type(loss_fn_config).__name__}"
        )
    sent: dict[str, float | str] = {}
    given: Any
    for key, given in loss_fn_config.items():
        where = f"loss_fn_config[{key!r}]"
        if not isinstance(key, str):
            raise TypeError(f"the names in loss_fn_config are strings, got {key!r}")
        if not (isinstance(given, str) or hasattr(given, "__float__")):
            raise TypeError(f"{where} must be a number or a string, got {type(given).__name__}")
        value = given if isinstance(given, str | int) else as_float(given, where)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where} must be finite, got {value}")
        sent[key] = value
    return sent


def check_sample(prompt: Any, num_samples: Any, sampling_params: Any) -> None:
    """Rejects samples without a prompt, a number of samples or sampling parameters."""
    if not isinstance(prompt, ModelInput | Mapping):
        raise TypeError(
            f"the prompt is a ModelInput, got {type(prompt).__name__}; build one with ModelInput.from_ints(tokens)"
        )
    if not isinstance(sampling_params, SamplingParams | Mapping):
        raise TypeError(f"sampling_params is a SamplingParams, got {type(sampling_params).__name__}")
    if as_int(num_samples, "num_samples") < 1:
        raise ValueError(f"num_samples is an integer ≥ 1, got {num_samples!r}")


def check_offered(params: SamplingParams, server: ClientConfigResponse) -> None:
    """Rejects fields of our extension that the server does not read: it might ignore them in silence."""
    missing = [name for name in params.extensions() if name not in (server.sampling_extensions or ())]
    if missing:
        raise Unsupported(
            f"this server does not offer SamplingParams.{', '.join(missing)}; leave it out, or sample on a Tinkex engine"
        )


def check_prompt_options(request: SampleRequest) -> None:
    """Rejects options for the prompt that contradict each other."""
    targets, last_n = request.target_prompt_logprobs, request.prompt_logprobs_last_n
    if targets is not None and (targets.dtype != "int64" or targets.shape is None or len(targets.shape) != 2):
        raise ValueError("target_prompt_logprobs is an int64 tensor of two dimensions (prompt length − 1, K)")
    if request.prompt_alt_tokens_k < 0:
        raise ValueError(f"prompt_alt_tokens_k is at least 0, got {request.prompt_alt_tokens_k}")
    if last_n is not None and last_n < 1:
        raise ValueError(f"prompt_logprobs_last_n is at least 1, got {last_n}")
    if last_n is not None and not request.prompt_logprobs:
        raise ValueError("prompt_logprobs_last_n needs include_prompt_logprobs=True")
