"""Regularizers: penalties added to a custom loss, each with an exact gradient.

::

    from tinkex.losses.regularizers import KLDivergence, L2

    training.forward_backward_custom(
        batch,
        my_loss,
        regularizers=[
            types.RegularizerSpec(KLDivergence("reference_logprobs", sampled_by="model"), weight=0.1),
            types.RegularizerSpec(L2(center="mean"), weight=0.01),
        ],
    )

A regularizer is any function of (data, logprobs) that returns (value, metrics), like a custom loss. The
built-in ones take the logprobs of the targets, [T] or [T, K] per datum.
"""

from __future__ import annotations

from tinkex.losses.regularizers.distributions import Entropy, KLDivergence
from tinkex.losses.regularizers.norms import L1, L2, ElasticNet
from tinkex.losses.regularizers.pipeline import Pipeline, with_regularizers
from tinkex.losses.regularizers.structure import Consistency, GradientPenalty, Orthogonality
from tinkex.types.regularizers import CustomLossOutput, Regularizer, RegularizerOutput, RegularizerSpec

__all__ = [
    "L1",
    "L2",
    "Consistency",
    "CustomLossOutput",
    "ElasticNet",
    "Entropy",
    "GradientPenalty",
    "KLDivergence",
    "Orthogonality",
    "Pipeline",
    "Regularizer",
    "RegularizerOutput",
    "RegularizerSpec",
    "with_regularizers",
]
