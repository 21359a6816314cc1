"""From logits to a drawn token and its logprob: temperature, min-p, top-k, top-p and the draw itself.

Every row is computed from its own logits, settings and uniform random number, so the other rows of the batch change
only the last bits of the logits.

Shapes: B rows of the batch, V vocabulary, M candidates of a truncated distribution.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import pad

from tinkex.engine.sampler.job import TOP_K_OFF

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "Draw",
    "RowSettings",
    "draw",
    "draw_many",
    "prompt_rng",
    "sample_rng",
    "scaled_logprobs",
    "without_improbable",
]

_NUCLEUS_CANDIDATES = 256
_NUCLEUS_GROWTH = 16
_DRAW_BLOCK = 256
_MANY_ROWS = 16  # rows whose cumulative sums exist simultaneously: 6 MB for a vocabulary of 49,152
_BELOW_ONE = float(np.nextafter(1.0, 0.0))


@dataclass(frozen=True)
class RowSettings:
    """How one row is drawn.

    ``temperature=0`` is greedy. ``min_p=0``, ``top_k=-1`` and ``top_p=1`` truncate nothing. They apply in this order, each to
    the renormalized distribution that the one before leaves.
    """

    temperature: float = 1.0
    top_k: int = TOP_K_OFF
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        """Whether the row takes the argmax instead of drawing a token."""
        return self.temperature == 0

    @property
    def method(self) -> tuple[str, int]:
        """The kind of draw, and its top-k; rows with the same method are drawn together."""
        if self.greedy:
            return "greedy", TOP_K_OFF
        if self.top_k == TOP_K_OFF and self.top_p >= 1:
            return "full", TOP_K_OFF
        return "truncated", self.top_k


@dataclass(frozen=True)
class Draw:
    """One token per row, and the distribution it is reported under."""

    tokens_B: Tensor
    logprobs_B: Tensor
    distribution_BV: Tensor
    """Logprobs of the temperature-scaled distribution, before min-p, top-k and top-p."""
    finite_B: Tensor
    """False where the logits contain NaN or +inf; the token of such a row is not valid."""

    def distribution(self, rows: Sequence[int]) -> Tensor:
        """The logprobs of all tokens in some rows."""
        return self.distribution_BV[list(rows)]


def sample_rng(seed: int | None, sample_index: int) -> np.random.Generator:
    """The random numbers of one sample: the same for the same (seed, index), fresh entropy without a seed.

    A seed is any integer, negative or beyond 64 bits.

    Example:
        >>> sample_rng(2**70, 0).random() == sample_rng(2**70, 0).random()
        True
        >>> sample_rng(7, 0).random() == sample_rng(7, 1).random()
        False
    """
    if seed is None:
        return np.random.default_rng()
    return np.random.default_rng(np.random.SeedSequence(abs(seed), spawn_key=(sample_index, int(seed < 0))))


def prompt_rng(seed: int | None) -> np.random.Generator:
    """The random numbers of draws within a prompt, independent of those of every sample.

    Example:
        >>> prompt_rng(7).random() == prompt_rng(7).random()
        True
        >>> prompt_rng(7).random() == sample_rng(7, 0).random()
        False
    """
    if seed is None:
        return np.random.default_rng()
    # The key has one element; those of samples have two.
    return np.random.default_rng(np.random.SeedSequence(abs(seed), spawn_key=(int(seed < 0),)))


def scaled_logprobs(logits_BV: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Logprobs of the temperature-scaled distributions, (B, V) in fp32; temperature 0 is reported at 1.

    Example:
        >>> scaled_logprobs(torch.zeros(1, 4), [0.5]).exp()
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    if any(temperature not in {0.0, 1.0} for temperature in temperatures):
        scale_B = torch.tensor([temperature or 1.0 for temperature in temperatures], dtype=torch.float32)
        # Subtracting before the division: differences of large quotients would keep few bits.
        logits_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / scale_B[:, None]
    return torch.log_softmax(logits_BV, dim=-1)


def without_improbable(scaled_BV: Tensor, min_p_B: Sequence[float]) -> Tensor:
    """Temperature-scaled logits, with -inf for tokens less probable than ``min_p`` times the most probable one.

    Example:
        >>> without_improbable(torch.tensor([[0.0, 1.0, 3.0]]), [0.1])
        tensor([[-inf, 1., 3.]])
    """
    log_min_p_B1 = torch.tensor(min_p_B, dtype=torch.float64).log()[:, None]
    below_max_BV = scaled_BV - scaled_BV.amax(dim=-1, keepdim=True)
    return scaled_BV.masked_fill(below_max_BV < log_min_p_B1, -torch.inf)


def draw(logits_BV: Tensor, settings: Sequence[RowSettings], uniforms: Sequence[float]) -> Draw:
    """Draws one token per row: the inverse of its cumulative distribution at its uniform in [0, 1).

    Example:
        >>> draw(torch.tensor([[0.0, 9.0]]), [RowSettings(temperature=0)], [0.0]).tokens_B
        tensor([1])
    """
    distribution_BV = scaled_logprobs(logits_BV, [row.temperature for row in settings])
    uniforms_B = torch.tensor(uniforms, dtype=torch.float64)
    tokens_B = torch.empty(len(settings), dtype=torch.int64)
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row, setting in enumerate(settings):
        groups[setting.method].append(row)
    for (kind, top_k), rows in groups.items():
        picked = torch.tensor(rows)
        # The common case of a single method copies no distributions.
        part_BV = distribution_BV if len(groups) == 1 else distribution_BV[picked]
        min_p_B = [settings[row].min_p for row in rows]
        if any(min_p_B) and kind != "greedy":
            part_BV = torch.log_softmax(without_improbable(part_BV, min_p_B), dim=-1)
        if kind == "greedy":
            tokens_B[picked] = part_BV.argmax(dim=-1)
        elif kind == "full":
            tokens_B[picked] = _draw_full(part_BV, uniforms_B[picked])
        else:
            top_p_B = torch.tensor([settings[row].top_p for row in rows], dtype=torch.float64)
            tokens_B[picked] = _draw_truncated(part_BV, top_k, top_p_B, uniforms_B[picked])
    logprobs_B = distribution_BV.gather(1, tokens_B[:, None])[:, 0]
    # With a NaN or +inf among its logits, a row has no finite logprob, so the drawn one shows it.
    return Draw(tokens_B, logprobs_B, distribution_BV, torch.isfinite(logprobs_B))


def draw_many(logits_RV: Tensor, temperature: float, uniforms_Rk: Tensor) -> Tensor:
    """Draws several tokens per row, one for each of its uniforms in [0, 1), from the untruncated distribution.

    Temperature 0 gives the argmax every time.

    Example:
        >>> draw_many(torch.tensor([[0.0, 9.0]]), 0.0, torch.rand(1, 3, dtype=torch.float64))
        tensor([[1, 1, 1]])
    """
    if temperature == 0:
        return logits_RV.argmax(dim=-1, keepdim=True).expand(uniforms_Rk.shape)
    tokens = [
        _draw_rows(part_RV, temperature, part_Rk)
        for part_RV, part_Rk in zip(
            torch.split(logits_RV, _MANY_ROWS), torch.split(uniforms_Rk, _MANY_ROWS), strict=True
        )
    ]
    return torch.cat(tokens) if tokens else torch.empty(uniforms_Rk.shape, dtype=torch.int64)


def _draw_rows(logits_RV: Tensor, temperature: float, uniforms_Rk: Tensor) -> Tensor:
    probabilities_RV = scaled_logprobs(logits_RV, [temperature]).double().exp()
    ends_RV = probabilities_RV.cumsum(dim=-1)
    total_R1 = ends_RV[:, -1:]
    target_Rk = torch.minimum(uniforms_Rk * total_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    return torch.searchsorted(ends_RV, target_Rk, right=True).clamp(max=logits_RV.shape[1] - 1)


def _draw_full(logprobs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Draws from the untruncated distributions: first a block of the vocabulary, then a token in it.

    A cumulative sum over the blocks instead of the vocabulary reads each probability once.
    """
    probabilities_BV = logprobs_BV.exp()
    padding = -logprobs_BV.shape[1] % _DRAW_BLOCK
    if padding:
        probabilities_BV = pad(probabilities_BV, (0, padding))
    blocks_BNM = probabilities_BV.view(len(logprobs_BV), -1, _DRAW_BLOCK)
    block_B, within_B = _invert(blocks_BNM.sum(dim=-1).double(), uniforms_B)
    token_B, _ = _invert(blocks_BNM[torch.arange(len(block_B)), block_B].double(), within_B)
    return (block_B * _DRAW_BLOCK + token_B).clamp(max=logprobs_BV.shape[1] - 1)


def _draw_truncated(logprobs_BV: Tensor, top_k: int, top_p_B: Tensor, uniforms_B: Tensor) -> Tensor:
    """Draws from the nucleus of the top-k tokens: the fewest of them that hold ``top_p`` of their mass."""
    vocab_size = logprobs_BV.shape[1]
    tokens_B = torch.empty(len(logprobs_BV), dtype=torch.int64)
    pending = torch.arange(len(logprobs_BV))
    width = min(vocab_size, _NUCLEUS_CANDIDATES if top_k == TOP_K_OFF else top_k)
    while len(pending):
        candidates = logprobs_BV[pending].topk(width)
        mass_BM = candidates.values.double().exp()
        total_B1 = (
            mass_BM.sum(dim=-1, keepdim=True) if top_k != TOP_K_OFF else mass_BM.new_ones(len(pending), 1)
        )
        before_BM = mass_BM.cumsum(dim=-1) - mass_BM
        nucleus_B1 = top_p_B[pending, None] * total_B1
        # Without top-k the nucleus can reach beyond the candidates; those rows try again with more of them.
        held_B = before_BM[:, -1] + mass_BM[:, -1] >= nucleus_B1[:, 0]
        done_B = held_B | held_B.new_tensor(top_k != TOP_K_OFF or width == vocab_size)
        kept_BM = torch.where(before_BM < nucleus_B1, mass_BM, 0.0)
        choice_B, _ = _invert(kept_BM, uniforms_B[pending])
        chosen_B = candidates.indices.gather(1, choice_B[:, None])[:, 0]
        tokens_B[pending[done_B]] = chosen_B[done_B]
        pending = pending[~done_B]
        width = min(vocab_size, width * _NUCLEUS_GROWTH)
    return tokens_B


def _invert(mass_BM: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Inverts the cumulative sum of the masses: each uniform's cell, and its position in that cell, in [0, 1).

    A cell without mass is never chosen.
    """
    ends_BM = mass_BM.cumsum(dim=-1)
    total_B = ends_BM[:, -1]
    # Rounding must not move a uniform close to 1 past the last cell that has mass.
    target_B = torch.minimum(uniforms_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    cell_B = torch.searchsorted(ends_BM, target_B[:, None], right=True)[:, 0].clamp(max=mass_BM.shape[1] - 1)
    size_B = mass_BM.gather(1, cell_B[:, None])[:, 0]
    start_B = ends_BM.gather(1, cell_B[:, None])[:, 0] - size_B
    return cell_B, ((target_B - start_B) / size_B).clamp(0.0, _BELOW_ONE)
