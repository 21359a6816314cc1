"""Compute all eight regularizers without a server, with their gradients.

You will see what each one adds to a loss on two short answers and how hard it pulls on the logprobs, one of
your own that waits for something, and what happens when a term cannot be differentiated.
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


async def slow_opinion(_data, logprobs):
    """One that waits, as for a reference model elsewhere; such terms run beside the others."""
    await asyncio.sleep(0.05)
    return (torch.cat(list(logprobs)) + 1.0).square().mean(), {"asked": 1.0}


def main() -> None:
    built_in = (
        L1(), L2(center="mean"), ElasticNet(l1_ratio=0.3), Entropy(mode="maximize"), KLDivergence("reference"),
        Consistency("reference"), Orthogonality(), GradientPenalty(squared),
    )  # fmt: skip
    pipeline = Pipeline([RegularizerSpec(term, weight=0.1) for term in (*built_in, slow_opinion)])
    output = pipeline.evaluate(DATA, LOGPROBS, nll)
    print(f"{'term':18} {'value':>8} {'adds':>8} {'pulls':>8}")
    for name, term in output.regularizers.items():
        print(f"{name:18} {term.value:8.4f} {term.contribution:8.4f} {term.grad_norm:8.4f}")
    print(f"loss {output.loss_total:.4f} = {output.base_loss:.4f} + {output.regularizer_total:.4f}")

    def constant(_data, _logprobs):
        return torch.tensor(1.0), {}

    try:
        Pipeline([RegularizerSpec(constant, weight=1.0)]).evaluate(DATA, LOGPROBS, nll)
    except ValueError as error:
        print("refused:", error)


if __name__ == "__main__":
    main()
