"""Penalties on relations of logprobs: to a second view, to each other, and to a loss's gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from tinkex.losses.custom import CustomLoss
from tinkex.losses.regularizers.positions import (
    Logprobs,
    LogprobsSource,
    Penalty,
    Reduction,
    check_choice,
    check_data,
    check_number,
    check_output,
    check_reduction,
    concatenated,
    fixed_logprobs,
    reduce,
    select_positions,
    zero,
)
from tinkex.types import Datum

if TYPE_CHECKING:
    import torch

__all__ = ["Consistency", "GradientPenalty", "Orthogonality"]

MIN_NORM = 1e-8


@dataclass(frozen=True)
class Consistency:
    """Keeps logprobs near a second view of the same targets.

    The second view is constant (``pair``: a name in ``loss_fn_inputs``, arrays, or a function of the data), or
    differentiable: ``pairs(data)`` returns pairs of indices of datums with the same targets, such as one answer to two
    paraphrases, and both sides get a gradient. ``metric``: ``mse`` (a−b)², ``l1`` |a−b|, ``cosine``
    1 − cos(a, b) per datum, ``kl`` ½(A−B)(a−b), the symmetric divergence summed over the targets.
    ``reduction`` is ``"mean"`` or ``"sum"`` of positions; zeros of the ``loss_fn_input`` named ``where`` mask them out.

    >>> Consistency("original_logprobs", metric="l1").name
    'consistency'
    """

    pair: LogprobsSource | None = None
    pairs: Callable[[Sequence[Datum]], Sequence[tuple[int, int]]] | None = None
    metric: Literal["mse", "l1", "cosine", "kl"] = "mse"
    reduction: Reduction = "mean"
    where: str | None = None
    name: ClassVar[str] = "consistency"

    def __post_init__(self) -> None:
        check_choice("metric", self.metric, ("mse", "l1", "cosine", "kl"))
        check_reduction(self.reduction)
        if (self.pair is None) == (self.pairs is None):
            raise ValueError(
                "Consistency takes either pair or pairs: Consistency('original_logprobs') for stored logprobs, or "
                "Consistency(pairs=…) for datums of the same batch"
            )

    def __call__(self, data: Sequence[Datum], logprobs: Logprobs) -> Penalty:
        """Returns the penalty on these logprobs, and its metrics."""
        sides = select_positions(data, self.where, logprobs, self._others(data, logprobs))
        return reduce(
            [self._distance(a, b) for a, b in self._compared(data, sides)], logprobs, self.reduction
        ), {}

    def _others(self, data: Sequence[Datum], logprobs: Logprobs) -> Sequence[torch.Tensor]:
        return logprobs if self.pair is None else fixed_logprobs(self.pair, data, logprobs, "the pair")

    def _compared(
        self, data: Sequence[Datum], sides: Sequence[tuple[torch.Tensor, ...]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if self.pairs is None:
            joined = sides if self.metric == "cosine" else concatenated(sides)
            return [(a, b) for a, b in joined]
        compared = []
        for first, second in self.pairs(data):
            a, b = sides[first][0], sides[second][0]
            if a.shape != b.shape:
                raise ValueError(
                    f"data[{first}] and data[{second}] are a pair, but their shapes are {tuple(a.shape)} and "
                    f"{tuple(b.shape)}; a pair must have the same targets"
                )
            compared.append((a, b))
        return compared

    def _distance(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        match self.metric:
            case "mse":
                return (a - b).square()
            case "l1":
                return (a - b).abs()
            case "kl":
                return (a.exp() - b.exp()) * (a - b) / 2
            case "cosine":
                a, b = a.reshape(-1), b.reshape(-1)
                lengths = _norm(a).clamp(min=MIN_NORM) * _norm(b).clamp(min=MIN_NORM)
                return 1 - (a @ b) / lengths


@dataclass(frozen=True)
class Orthogonality:
    """Penalises the inner products of rows of logprobs, squared, so that rows become orthogonal.

    With one logprob per position the rows are the datums' sequences of logprobs (``rows="datums"``; shorter ones are
    zero-padded). With K candidates per position the rows may be the positions of a datum or its candidates.
    ``normalize`` compares directions only; ``center`` subtracts the mean of each row first: all logprobs are negative,
    so without it no two rows can be orthogonal. ``mode``: ``soft`` Σ off-diagonal G², ``hard`` Σ (G − 1)²,
    ``spectral`` (trace G − n)² + off-diagonal. A single row gives zero. Zeros of
    the ``loss_fn_input`` named ``where`` mask positions out.

    >>> Orthogonality(center=True).name
    'orthogonality'
    """

    mode: Literal["soft", "hard", "spectral"] = "soft"
    rows: Literal["datums", "positions", "candidates"] = "datums"
    normalize: bool = True
    center: bool = False
    where: str | None = None
    name: ClassVar[str] = "orthogonality"

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("soft", "hard", "spectral"))
        check_choice("rows", self.rows, ("datums", "positions", "candidates"))

    def __call__(self, data: Sequence[Datum], logprobs: Logprobs) -> Penalty:
        """Returns the penalty on these logprobs, and its metrics."""
        import torch

        kept = [lp for (lp,) in select_positions(data, self.where, logprobs)]
        if self.rows == "datums":
            rows = [self._centered(lp.reshape(-1)) for lp in kept]
            matrices = [torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)]
        else:
            matrices = [self._centered(self._matrix(index, lp)) for index, lp in enumerate(kept)]
        total = zero(logprobs)
        for matrix in matrices:
            total = total + self._penalty(matrix)
        return total, {"rows": float(sum(len(matrix) for matrix in matrices))}

    def _matrix(self, index: int, lp: torch.Tensor) -> torch.Tensor:
        if lp.ndim != 2:
            raise ValueError(
                f"rows={self.rows!r} needs the logprobs of several candidates per position (target_tokens of shape "
                f"[T, K]); those of data[{index}] have the shape {tuple(lp.shape)}. Use rows='datums'"
            )
        return lp if self.rows == "positions" else lp.T

    def _centered(self, rows: torch.Tensor) -> torch.Tensor:
        return rows - rows.mean(-1, keepdim=True) if self.center and rows.numel() else rows

    def _penalty(self, matrix: torch.Tensor) -> torch.Tensor:
        import torch

        if self.normalize:
            matrix = matrix / _norm(matrix).unsqueeze(-1).clamp(min=MIN_NORM)
        gram = matrix @ matrix.T
        diagonal = gram.diagonal()
        off_diagonal = (gram - torch.diag(diagonal)).square().sum()
        match self.mode:
            case "soft":
                return off_diagonal
            case "hard":
                return off_diagonal + (diagonal - 1).square().sum()
            case "spectral":
                return off_diagonal + (diagonal.sum() - len(gram)).square()


@dataclass(frozen=True)
class GradientPenalty:
    """Keeps the gradient norm of ``loss_fn`` near ``target_norm``: (‖∂loss/∂logprobs‖ − target_norm)².

    The gradient is with respect to the logprobs of all targets, at the logprobs themselves (``mode="output"``) or at
    a random point between them and a ``reference`` (``"interpolated"``; ``seed`` fixes the point). The penalty's own
    gradient uses the loss's second derivatives. A loss that is linear in the logprobs has none: the gradient of
    cross-entropy is its weights, so the penalty's gradient is zero.

    >>> GradientPenalty(lambda data, logprobs: (sum((lp**2).sum() for lp in logprobs), {})).name
    'gradient_penalty'
    """

    loss_fn: CustomLoss = field(repr=False)
    target_norm: float = 1.0
    mode: Literal["output", "interpolated"] = "output"
    reference: LogprobsSource | None = None
    seed: int | None = None
    name: ClassVar[str] = "gradient_penalty"

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise TypeError(
                "GradientPenalty needs a loss_fn: a function of (data, logprobs) that returns (loss, metrics)"
            )
        check_choice("mode", self.mode, ("output", "interpolated"))
        check_number("target_norm", self.target_norm)
        if self.target_norm < 0:
            raise ValueError(f"target_norm must be at least 0, got {self.target_norm!r}")
        if (self.mode == "interpolated") != (self.reference is not None):
            raise ValueError(
                "mode='interpolated' needs a reference to interpolate to, and no other mode takes one"
            )

    def __call__(self, data: Sequence[Datum], logprobs: Logprobs) -> Penalty:
        """Returns the penalty on these logprobs, and its metrics."""
        import torch

        check_data(data)
        points = list(logprobs)
        if self.reference is not None:
            fixed = fixed_logprobs(self.reference, data, logprobs, "the reference")
            points = [
                e * lp + (1 - e) * ref for e, lp, ref in zip(self._shares(points), points, fixed, strict=True)
            ]
        loss, _ = check_output("the loss of GradientPenalty", self.loss_fn(list(data), points))
        if not loss.requires_grad:
            raise ValueError(
                "the loss of GradientPenalty does not depend on the logprobs, so it has no gradient"
            )
        slopes = torch.autograd.grad(loss, points, create_graph=True, allow_unused=True)
        squares = zero(logprobs)
        for slope in slopes:
            if slope is not None:
                squares = squares + slope.square().sum()
        # The square root has no derivative at zero; a zero gradient gets a zero gradient here.
        length = torch.where(squares > 0, squares.clamp(min=1e-30).sqrt(), squares)
        return (length - self.target_norm).square(), {"slope_norm": float(length.detach())}

    def _shares(self, points: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        import torch

        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        return [torch.rand((), generator=generator, dtype=point.dtype) for point in points]


def _norm(rows: torch.Tensor) -> torch.Tensor:
    import torch

    lengths: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return lengths
