"""What no server could accept is refused here, before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tinkex.types import Datum, ImageAssetPointerChunk, ModelInput, SampleRequest, SamplingParams
from tinkex.types.coercion import as_float, as_int

__all__ = ["check_data", "check_loss", "check_name", "check_prompt_options", "check_sample", "check_ttl"]

LONGEST_PATH_NAME = 200


def check_name(name: str) -> None:
    """Refuses names that cannot be part of a checkpoint's path."""
    if not isinstance(name, str) or not name or len(name) > LONGEST_PATH_NAME or set(name) & set("/?#\\ "):
        raise ValueError(
            f"a checkpoint name is 1–{LONGEST_PATH_NAME} characters without slashes, spaces, '?' or '#'; got {name!r}"
        )


def check_ttl(ttl_seconds: int | None) -> None:
    """Refuses lifetimes that are over before they begin."""
    if ttl_seconds is not None and as_int(ttl_seconds, "ttl_seconds") <= 0:
        raise ValueError(
            f"ttl_seconds is the life of the checkpoint in seconds, and positive; got {ttl_seconds}"
        )


def check_data(data: Iterable[Datum]) -> list[Datum]:
    """The datums as a list of our own; refuses anything but datums that can be trained on."""
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
                f"data[{index}] points to an image by its location, which cannot be trained on; "
                "send the image itself as an ImageChunk"
            )
    return data


def check_loss(
    loss_fn: str, loss_fn_config: Mapping[str, float | str] | None
) -> dict[str, float | str] | None:
    """A copy of the loss's configuration, if it and the loss's name can be sent."""
    if not isinstance(loss_fn, str) or not loss_fn:
        raise TypeError(f"loss_fn is the name of a loss such as 'cross_entropy', got {loss_fn!r}")
    if loss_fn_config is None:
        return None
    sent: dict[str, float | str] = {}
    given: Any
    for key, given in loss_fn_config.items():
        where = f"loss_fn_config[{key!r}]"
        if not isinstance(key, str) or not (isinstance(given, str) or hasattr(given, "__float__")):
            raise TypeError(f"{where} must be a number or a text, got {type(given).__name__}")
        value = given if isinstance(given, str | int) else as_float(given, where)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where} must be finite, got {value}")
        sent[key] = value
    return sent


def check_sample(prompt: Any, num_samples: Any, sampling_params: Any) -> None:
    """Refuses samples without a prompt, a number or settings."""
    if not isinstance(prompt, ModelInput | Mapping):
        raise TypeError(
            f"the prompt is a ModelInput, got {type(prompt).__name__}; build one with ModelInput.from_ints(tokens)"
        )
    if not isinstance(sampling_params, SamplingParams | Mapping):
        raise TypeError(f"sampling_params is a SamplingParams, got {type(sampling_params).__name__}")
    if as_int(num_samples, "num_samples") < 1:
        raise ValueError(f"num_samples is a whole number ≥ 1, got {num_samples!r}")


def check_prompt_options(request: SampleRequest) -> None:
    """Refuses questions about the prompt that contradict each other."""
    targets, last_n = request.target_prompt_logprobs, request.prompt_logprobs_last_n
    if targets is not None and (targets.dtype != "int64" or targets.shape is None or len(targets.shape) != 2):
        raise ValueError("target_prompt_logprobs is an int64 tensor of two dimensions (prompt length − 1, K)")
    if request.prompt_alt_tokens_k < 0:
        raise ValueError(f"prompt_alt_tokens_k is at least 0, got {request.prompt_alt_tokens_k}")
    if last_n is not None and last_n < 1:
        raise ValueError(f"prompt_logprobs_last_n is at least 1, got {last_n}")
    if last_n is not None and not request.prompt_logprobs:
        raise ValueError("prompt_logprobs_last_n only makes sense with include_prompt_logprobs=True")
