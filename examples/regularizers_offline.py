"""Compute all eight regularizers and their gradients without a server.

You will see value, contribution and gradient norm of each one on two short answers, a custom asynchronous one,
and the error for a term that cannot be differentiated.
"""

from __future__ import annotations

import asyncio

import torch

from tinkex import types
from tinkex.losses.regularizers import (
    L1,
    L2,
    Consistency,
    ElasticNet,
    Entropy,
    GradientPenalty,
    KLDivergence,
    Orthogonality,
    Pipeline,
    RegularizerSpec,
)

LOGPROBS = [torch.tensor([-0.2, -1.5, -0.7]), torch.tensor([-2.0, -0.1, -0.4])]
REFERENCE = ([-0.3, -1.0, -0.9], [-1.5, -0.3, -0.4])
DATA = [
    types.Datum(
        types.ModelInput.from_ints([1, 2, 3]),
        {"target_tokens": [2, 3, 4], "reference": torch.tensor(reference)},
    )
    for reference in REFERENCE
]


def nll(_data, logprobs):
    return -torch.cat(list(logprobs)).sum(), {}


def squared(_data, logprobs):
    return torch.cat(list(logprobs)).square().sum(), {}


async def remote_penalty(_data, logprobs):
    """Waits, as for a remote reference model; such terms run concurrently with the others."""
    await asyncio.sleep(0.05)
    return (torch.cat(list(logprobs)) + 1.0).square().mean(), {"requests": 1.0}


def main() -> None:
    built_in = (
        L1(), L2(center="mean"), ElasticNet(l1_ratio=0.3), Entropy(mode="maximize"), KLDivergence("reference"),
        Consistency("reference"), Orthogonality(), GradientPenalty(squared),
    )  # fmt: skip
    pipeline = Pipeline([RegularizerSpec(term, weight=0.1) for term in (*built_in, remote_penalty)])
    output = pipeline.evaluate(DATA, LOGPROBS, nll)
    print(f"{'term':18} {'value':>8} {'weighted':>8} {'gradient':>8}")
    for name, term in output.regularizers.items():
        print(f"{name:18} {term.value:8.4f} {term.contribution:8.4f} {term.grad_norm:8.4f}")
    print(f"loss {output.loss_total:.4f} = {output.base_loss:.4f} + {output.regularizer_total:.4f}")

    def constant(_data, _logprobs):
        return torch.tensor(1.0), {}

    try:
        Pipeline([RegularizerSpec(constant, weight=1.0)]).evaluate(DATA, LOGPROBS, nll)
    except ValueError as error:
        print("rejected:", error)


if __name__ == "__main__":
    main()
