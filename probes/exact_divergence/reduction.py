"""The interface of reductions of a tile of logits, implemented for CPUs and for GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["SUMS", "Reduction", "TileSums", "overlaps"]

# The sums over the vocabulary. The terms of KL(μ‖π) are π − μ + μ log(μ/π): their sum is the same, and because none is
# negative nothing cancels if the distributions are nearly equal.
SUMS = ("kl", "reverse_kl", "tv", "chi2", "reverse_chi2", "target_entropy", "behaviour_entropy", "uncovered")


@dataclass(frozen=True, slots=True, eq=False)
class TileSums:
    """The result of a reduction; the target comes first.

    `sums` [rows, len(SUMS)] and `log_normalisers` [2, rows] are float64; `top_ids` [2, rows, K] int64 are the likeliest
    tokens, likeliest first, padded with −1. The sum `uncovered` is the probability under π of tokens with μ = 0.
    """

    sums: torch.Tensor
    log_normalisers: torch.Tensor
    top_ids: torch.Tensor


class Reduction(Protocol):
    """A reduction of two tiles of logits [rows, V], given to its constructor."""

    def reduce(self, rows: int) -> TileSums:
        """Return the sums of the first `rows` rows, whose logits are in the tiles."""

    def close(self) -> None:
        """Release threads and memory."""


def overlaps(top_ids: torch.Tensor, top_ks: tuple[int, ...]) -> torch.Tensor:
    """Return the share of common tokens among the k likeliest of `top_ids` [2, rows, K], shape [rows, len(top_ks)]."""
    target, behaviour = top_ids
    shares = torch.empty((target.shape[0], len(top_ks)), dtype=torch.float64, device=top_ids.device)
    for column, k in enumerate(top_ks):
        first, second = target[:, :k], behaviour[:, :k]
        common = ((first[:, :, None] == second[:, None, :]) & (first[:, :, None] >= 0)).sum((1, 2))
        named = torch.maximum((first >= 0).sum(1), (second >= 0).sum(1))
        shares[:, column] = common.double() / named
    return shares
