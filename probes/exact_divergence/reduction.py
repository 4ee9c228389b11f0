"""The reduction of two tiles of logits: its interface, and its implementation in plain torch, for GPUs.

`compiled_reduction` is the one for CPUs. Terms and sums are float64 in both. In torch, rows are reduced a few at a
time, so that the temporary arrays stay small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["SUMS", "Reduction", "TileSums", "TorchReduction", "overlaps"]

# The sums over the vocabulary. The terms of KL(μ‖π) are π − μ + μ log(μ/π): their sum is the same, and because none is
# negative nothing cancels if the distributions are nearly equal.
SUMS = ("kl", "reverse_kl", "tv", "chi2", "reverse_chi2", "target_entropy", "behaviour_entropy", "uncovered")

# Logits of a part; each of about twenty temporary arrays then takes 32 MiB.
_PART = 1 << 22
# Log-probability of masked tokens: e^x is 0, and it is finite, so that the difference of two of them is 0.
_MASKED = -1e300
# |log π − log μ| below which e^x − 1 − x is a polynomial, and its coefficients, from x² on.
_POLYNOMIAL = 0.3
_COEFFICIENTS = tuple(1.0 / math.factorial(power) for power in range(2, 14))


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


class TorchReduction:
    """Reduction of `target` and `behaviour`, tiles [rows, V] of one dtype."""

    def __init__(self, target: torch.Tensor, behaviour: torch.Tensor, top_k: int) -> None:
        self._tiles = (target, behaviour)
        self._top_k = top_k
        self._rows = max(_PART // target.shape[1], 1)

    def reduce(self, rows: int) -> TileSums:
        parts = []
        for start in range(0, rows, self._rows):
            part = slice(start, min(start + self._rows, rows))
            parts.append(_reduce(self._tiles[0][part].double(), self._tiles[1][part].double(), self._top_k))
        sums, normalisers, ids = zip(*parts, strict=True)
        return TileSums(torch.cat(sums), torch.cat(normalisers, 1), torch.cat(ids, 1))

    def close(self) -> None:
        pass


def _reduce(target: torch.Tensor, behaviour: torch.Tensor, top_k: int) -> tuple[torch.Tensor, ...]:
    """Return `sums`, `log_normalisers` and `top_ids` of TileSums."""
    ids = torch.stack([_likeliest(logits, top_k) for logits in (target, behaviour)])
    (log_pi, of_target, log_target), (log_mu, of_behaviour, log_behaviour) = (
        _log_probs(logits) for logits in (target, behaviour)
    )
    # The parts of the normalisers are subtracted one after the other: logits of 1e4 would otherwise lose digits.
    d = (of_target - of_behaviour) - (log_target[1] - log_behaviour[1])
    only_target = (behaviour == -math.inf) & (target > -math.inf)
    only_behaviour = (target == -math.inf) & (behaviour > -math.inf)
    sums = torch.stack(_sums(d, log_pi, log_mu, only_target, only_behaviour), 1)
    normalisers = torch.stack([log_target.sum(0)[:, 0], log_behaviour.sum(0)[:, 0]])
    sums[~torch.isfinite(normalisers).all(0)] = math.nan
    return sums, normalisers, ids


def _log_probs(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the log-probs, the logits less the largest, and the two parts [2, rows, 1] of the log-normaliser."""
    largest = logits.amax(1, keepdim=True)
    shifted = logits - largest.clamp_min(torch.finfo(torch.float64).min)
    log_total = shifted.exp().sum(1, keepdim=True).log()
    shifted = torch.where(logits == -math.inf, _MASKED, shifted)
    return shifted - log_total, shifted, torch.stack([largest, log_total])


def _sums(
    d: torch.Tensor, log_pi: torch.Tensor, log_mu: torch.Tensor, only_target: torch.Tensor, only_behaviour: torch.Tensor
) -> list[torch.Tensor]:
    """Return the sums of SUMS.

    With s = |d|, `likelier` the larger of π and μ, and w = 1 − e^−s: |π − μ| = likelier·w.
    """
    below, s = d < 0.0, d.abs()
    log_likelier = torch.where(below, log_mu, log_pi)
    likelier, decay, w = log_likelier.exp(), (-s).exp(), -torch.expm1(-s)
    small = s < _POLYNOMIAL
    curve = _curve(-s.clamp_max(_POLYNOMIAL))
    away = torch.where(small, curve, s - w)  # s − w
    toward = torch.where(small, w * s - curve, w - decay * s)  # e^−s·(e^s − 1 − s)
    quadratic = likelier * w * w
    inflated = (log_likelier + s).exp() * w * w  # (π − μ)² over the smaller
    smaller = likelier * decay
    terms = {
        "kl": torch.where(only_behaviour, math.inf, likelier * torch.where(below, away, toward)),
        "reverse_kl": torch.where(only_target, math.inf, likelier * torch.where(below, toward, away)),
        "tv": 0.5 * likelier * w,
        "chi2": torch.where(only_target, math.inf, torch.where(below, quadratic, inflated)),
        "reverse_chi2": torch.where(only_behaviour, math.inf, torch.where(below, inflated, quadratic)),
        "target_entropy": -torch.where(below, smaller, likelier) * log_pi,
        "behaviour_entropy": -torch.where(below, likelier, smaller) * log_mu,
        "uncovered": torch.where(only_target, likelier, 0.0),
    }
    sums = {name: values.sum(1) for name, values in terms.items()}
    sums["tv"] = sums["tv"].clamp_max(1.0)
    return [sums[name] for name in SUMS]


def _curve(x: torch.Tensor) -> torch.Tensor:
    """Return e^x − 1 − x for small |x|."""
    total = torch.full_like(x, _COEFFICIENTS[-1])
    for coefficient in reversed(_COEFFICIENTS[:-1]):
        total = total * x + coefficient
    return x * x * total


def _likeliest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return the ids of the k largest logits, [rows, k], falling; of equal ones the lower id, −1 in place of −∞."""
    least = torch.where(logits.isnan(), -math.inf, logits).topk(k, 1).values[:, -1:]
    above, equal = logits > least, logits == least
    kept = above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True)))
    # Rows with a NaN, whose results are NaN, may keep fewer.
    known = kept.sum(1) == k
    ids = torch.full((logits.shape[0], k), -1, dtype=torch.int64, device=logits.device)
    ids[known] = kept[known].nonzero()[:, 1].reshape(-1, k)
    values = logits.gather(1, ids.clamp_min(0))
    order = values.sort(dim=1, descending=True, stable=True).indices
    ids, values = ids.gather(1, order), values.gather(1, order)
    return torch.where(values == -math.inf, -1, ids)
