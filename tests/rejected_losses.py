"""Functions that no server could run as a loss, with a part of what the rejection says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CAPTURED = torch.ones(2)
MODULE = torch.nn.Softplus()


def branching(logprobs: Any) -> Any:
    return (logprobs.sum() if logprobs.sum() > 0 else logprobs.mean()), {}


def no_logprobs(advantages: Any) -> Any:
    return advantages.sum(), {}


def with_default(logprobs: Any, beta: Any = 1) -> Any:
    return logprobs.sum() * beta, {}


def by_keyword(logprobs: Any, *, beta: Any) -> Any:
    return logprobs.sum() * beta, {}


def starred(logprobs: Any, *rest: Any) -> Any:
    return logprobs.sum(), {}


def capitals(logprobs: Any, Beta: Any) -> Any:
    return logprobs.sum() * Beta, {}


def many(logprobs: Any, a1, a2, a3, a4, a5, a6, a7, a8, a9, b1, b2, b3, b4, b5, b6, b7) -> Any:  # type: ignore[no-untyped-def]
    return logprobs.sum(), {}


def leaves_torch(logprobs: Any) -> Any:
    return logprobs.sum(), {"custom/x:sum": logprobs.sum().item()}


def goes_back(logprobs: Any) -> Any:
    logprobs.sum().backward()
    return logprobs.sum(), {}


def captures(logprobs: Any) -> Any:
    return (logprobs * CAPTURED).sum(), {}


def uses_a_module(logprobs: Any) -> Any:
    return MODULE(logprobs).sum(), {}


def no_such_method(logprobs: Any) -> Any:
    return logprobs.frobnicate(), {}


def only_the_loss(logprobs: Any) -> Any:
    return logprobs.sum()


def a_number(logprobs: Any) -> Any:
    return 1.0, {}


def metrics_as_a_list(logprobs: Any) -> Any:
    return logprobs.sum(), [logprobs.mean()]


def misnamed(logprobs: Any) -> Any:
    return logprobs.sum(), {"loss:sum": logprobs.sum()}


def constant_metric(logprobs: Any) -> Any:
    return logprobs.sum(), {"custom/x:mean": 3.0}


ONE = {"logprobs": 1}


REJECTED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (branching, ONE, "torch.where"),
    (no_logprobs, {"advantages": 1}, "have logprobs as its first parameter"),
    (with_default, {"logprobs": 1, "beta": 0}, "default for 'beta'"),
    (by_keyword, {"logprobs": 1, "beta": 0}, "by star or keyword"),
    (starred, {"logprobs": 1, "rest": 0}, "by star or keyword"),
    (capitals, {"logprobs": 1, "Beta": 0}, "parameter 'Beta'"),
    (many, ONE, "at most 16"),
    (leaves_torch, ONE, "returns no tensor"),
    (goes_back, ONE, r"calls backward\(\)"),
    (captures, ONE, "captures a tensor"),
    (uses_a_module, ONE, "torch.nn.functional"),
    (no_such_method, ONE, r"frobnicate\(\), which tensors do not have"),
    (only_the_loss, ONE, r"does not return \(loss, metrics\)"),
    (a_number, ONE, "returns the loss 1.0"),
    (metrics_as_a_list, ONE, "as metrics; return a dict"),
    (misnamed, ONE, "custom/<name>:sum"),
    (constant_metric, ONE, "with the value 3.0"),
    (only_the_loss, {}, "input_ranks must give a rank for each"),
    (only_the_loss, {"logprobs": 1, "weights": 1}, "input_ranks must give a rank for each"),
    (only_the_loss, {"logprobs": 0}, "rank 0"),
    (only_the_loss, {"logprobs": 3}, "rank 3"),
]
