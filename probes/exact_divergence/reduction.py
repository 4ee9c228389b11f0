"""What is taken from a tile of logits: the seam between the compiled reduction on CPUs and the Triton one on GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["SUMS", "Reduction", "TileSums", "overlaps"]

# What is summed over the vocabulary. Terms of KL(μ‖π) are π − μ + μ log(μ/π), which add up to the same and are never
# negative: nothing cancels where the two distributions are nearly one.
SUMS = ("kl", "reverse_kl", "tv", "chi2", "reverse_chi2", "target_entropy", "behaviour_entropy", "uncovered")


@dataclass(frozen=True, slots=True, eq=False)
class TileSums:
    """`sums` [rows, len(SUMS)] and `log_normalisers` [2, rows], target first, float64; `top_ids` [2, rows, K] int64:
    the likeliest tokens of both, likeliest first, −1 where there are no more. `uncovered` is π's mass where μ is 0.
    """

    sums: torch.Tensor
    log_normalisers: torch.Tensor
    top_ids: torch.Tensor


class Reduction(Protocol):
    """Reduces two tiles of logits [rows, V], which it was given when it was made."""

    def reduce(self, rows: int) -> TileSums:
        """Return the sums of the first `rows` rows, whose logits are in the tiles."""

    def close(self) -> None:
        """Let go of what the reduction holds."""


def overlaps(top_ids: torch.Tensor, top_ks: tuple[int, ...]) -> torch.Tensor:
    """[rows, len(top_ks)] the share of the k likeliest tokens that both name, from `top_ids` [2, rows, K]."""
    target, behaviour = top_ids
    shares = torch.empty((target.shape[0], len(top_ks)), dtype=torch.float64, device=top_ids.device)
    for column, k in enumerate(top_ks):
        first, second = target[:, :k], behaviour[:, :k]
        common = ((first[:, :, None] == second[:, None, :]) & (first[:, :, None] >= 0)).sum((1, 2))
        named = torch.maximum((first >= 0).sum(1), (second >= 0).sum(1))
        shares[:, column] = common.double() / named
    return shares
