"""The reduction of two tiles of logits on a CPU: float64 throughout, two sweeps, the first while a block is in cache.

The first sweep takes the normalisers and the likeliest tokens, block by block as the products are done. The second
takes what needs both normalisers: total variation has no form that can be rescaled later, and the terms of the others
only stay clear of cancellation when log π − log μ is known. Both are compiled with numba and vectorised; rows are
shared out among as many threads as torch uses. The result does not depend on their number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from probes.exact_divergence.reduction import SUMS, TileSums
from probes.exact_divergence.vector_math import choose, curvature, exponential, reduced

__all__ = ["CompiledReduction"]

F = TypeVar("F", bound=Callable[..., Any])
Logits = NDArray[np.floating]
Float64 = NDArray[np.float64]

# Log-probabilities of masked tokens: so low that e^x is 0, and finite, so that differences of two of them are 0.
_MASKED = -1e300
_SCANNED = 256  # tokens whose largest logit is compared with the least of the likeliest so far
_POLYNOMIAL = 0.3  # below this |log π − log μ| differences come from the polynomial alone
_EXHAUSTED = 700.0  # above it e^−x is nothing


def _compiled(function: F, *flags: str) -> F:
    """The function, compiled on its first call.

    Nothing is kept on disk: numba would go on using machine code that was made of another `vector_math`.
    """
    made: F = numba.njit(nogil=True, error_model="numpy", fastmath=set(flags))(function)
    return made


def _largest(logits: Logits) -> float:
    largest = -math.inf
    for index in range(logits.size):
        value = np.float64(logits[index])
        largest = choose(value > largest, value, largest)
    return largest


def _exponential_sum(logits: Logits, shift: float) -> float:
    total = 0.0
    for index in range(logits.size):
        total += exponential(np.float64(logits[index]) - shift)
    return total


# The largest of a block that holds a NaN is any number: the sum of its exponentials is NaN, and so is all the rest.
largest_of = _compiled(_largest, "nnan", "nsz", "reassoc", "contract")
exponential_sum = _compiled(_exponential_sum, "reassoc", "nsz", "contract")


def _insert(logits: Logits, first_id: int, values: Float64, ids: NDArray[np.int64]) -> None:
    """Keep `values` and `ids` the likeliest so far, falling; only a larger logit displaces one of a lower id."""
    last = values.size - 1
    for index in range(logits.size):
        value = np.float64(logits[index])
        if value > values[last]:
            place = last
            while place > 0 and value > values[place - 1]:
                values[place] = values[place - 1]
                ids[place] = ids[place - 1]
                place -= 1
            values[place] = value
            ids[place] = first_id + index


insert = _compiled(_insert)


def _take_block(
    logits: Logits, first_id: int, shifts: Float64, totals: Float64, values: Float64, ids: NDArray[np.int64]
) -> None:
    """Add a block [rows, width] to each row's Σ e^(logit − shift), shift being the largest so far."""
    for row in range(logits.shape[0]):
        block = logits[row]
        largest = float(shifts[row])
        for start in range(0, block.size, _SCANNED):
            part = block[start : start + _SCANNED]
            of_part = largest_of(part)
            largest = max(largest, of_part)
            if of_part > values[row, values.shape[1] - 1]:
                insert(part, first_id + start, values[row], ids[row])
        if largest > shifts[row]:
            totals[row] *= math.exp(shifts[row] - largest)
            shifts[row] = largest
        totals[row] += exponential_sum(block, largest if largest > -math.inf else 0.0)


take_block = _compiled(_take_block)


def _row_sums(target: Logits, behaviour: Logits, shifts: Float64, log_totals: Float64, sums: Float64) -> None:
    """All of SUMS over the vocabulary of one token, from its logits [V]; `shifts` and `log_totals` [2] add up to the
    log-normalisers, but logits of 1e4 keep their digits only if the largest is subtracted first.

    With s = |log π − log μ|, `larger` the larger of π and μ, and shrinkage w = 1 − e^−s: |π − μ| = larger·w.
    """
    kl = reverse_kl = distance = chi2 = reverse_chi2 = target_entropy = behaviour_entropy = uncovered = 0.0
    shift_target, shift_behaviour = shifts[0], shifts[1]
    log_target, log_behaviour = log_totals[0], log_totals[1]
    log_difference = log_target - log_behaviour
    for index in range(target.size):
        x = np.float64(target[index])
        y = np.float64(behaviour[index])
        only_behaviour = (x == -math.inf) & (y > -math.inf)
        only_target = (y == -math.inf) & (x > -math.inf)
        of_target = choose(x == -math.inf, _MASKED, x - shift_target)
        of_behaviour = choose(y == -math.inf, _MASKED, y - shift_behaviour)
        d = (of_target - of_behaviour) - log_difference
        log_pi = of_target - log_target
        log_mu = of_behaviour - log_behaviour
        below = d < 0.0
        s = abs(d)
        log_larger = choose(below, log_mu, log_pi)
        larger = exponential(log_larger)
        r, scale = reduced(-s)
        curve = r * r * curvature(r)
        small = s < _POLYNOMIAL
        decay = choose(s > _EXHAUSTED, 0.0, scale + scale * (r + curve))
        w = choose(small, -(r + curve), 1.0 - decay)
        away = choose(small, curve, s - w)  # s − w
        toward = choose(small, w * s - curve, w - decay * s)  # e^−s·(e^s − 1 − s)
        smaller = larger * decay
        quadratic = larger * w * w
        inflated = exponential(log_larger + s) * w * w  # (π − μ)² over the smaller
        kl += choose(only_behaviour, math.inf, larger * choose(below, away, toward))
        reverse_kl += choose(only_target, math.inf, larger * choose(below, toward, away))
        distance += larger * w
        chi2 += choose(only_target, math.inf, choose(below, quadratic, inflated))
        reverse_chi2 += choose(only_behaviour, math.inf, choose(below, inflated, quadratic))
        target_entropy -= choose(below, smaller, larger) * log_pi
        behaviour_entropy -= choose(below, larger, smaller) * log_mu
        uncovered += choose(only_target, larger, 0.0)
    sums[0] = kl
    sums[1] = reverse_kl
    sums[2] = min(0.5 * distance, 1.0)
    sums[3] = chi2
    sums[4] = reverse_chi2
    sums[5] = target_entropy
    sums[6] = behaviour_entropy
    sums[7] = uncovered


row_sums = _compiled(_row_sums, "reassoc", "nsz", "contract")


def _tile_sums(target: Logits, behaviour: Logits, shifts: Float64, log_totals: Float64, sums: Float64) -> None:
    for row in range(target.shape[0]):
        if math.isfinite(shifts[row].sum() + log_totals[row].sum()):
            row_sums(target[row], behaviour[row], shifts[row], log_totals[row], sums[row])
        else:
            sums[row] = math.nan


tile_sums = _compiled(_tile_sums)


class CompiledReduction:
    """Reduces `target` and `behaviour`, tiles [rows, V] in a CPU's memory of one dtype, float32 or float64."""

    def __init__(self, target: torch.Tensor, behaviour: torch.Tensor, top_k: int) -> None:
        self._tiles = (target.numpy(), behaviour.numpy())
        rows = target.shape[0]
        self._shifts = np.empty((2, rows))
        self._totals = np.empty((2, rows))
        self._values = np.empty((2, rows, top_k))
        self._ids = np.empty((2, rows, top_k), dtype=np.int64)
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="exact-divergence")

    def take(self, start: int, stop: int, rows: int) -> None:
        if start == 0:
            self._shifts[:] = -math.inf
            self._totals[:] = 0.0
            self._values[:] = -math.inf
            self._ids[:] = -1

        def share(part: slice) -> None:
            for side, tile in enumerate(self._tiles):
                take_block(
                    tile[part, start:stop],
                    start,
                    self._shifts[side, part],
                    self._totals[side, part],
                    self._values[side, part],
                    self._ids[side, part],
                )

        self._share_out(share, rows)

    def finish(self, rows: int) -> TileSums:
        shifts = np.ascontiguousarray(self._shifts[:, :rows].T)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_totals = np.log(self._totals[:, :rows].T, order="C")
            log_normalisers = (shifts + log_totals).T
        sums = np.empty((rows, len(SUMS)))

        def share(part: slice) -> None:
            target, behaviour = self._tiles
            tile_sums(target[part], behaviour[part], shifts[part], log_totals[part], sums[part])

        self._share_out(share, rows)
        ids = torch.from_numpy(self._ids[:, :rows].copy())
        return TileSums(torch.from_numpy(sums), torch.from_numpy(log_normalisers), ids)

    def close(self) -> None:
        self._pool.shutdown()

    def _share_out(self, work: Callable[[slice], None], rows: int) -> None:
        """Do `work` on all rows, an equal part on each thread."""
        cuts = np.linspace(0, rows, min(self._threads, rows) + 1).astype(int)
        list(self._pool.map(work, [slice(int(a), int(b)) for a, b in itertools.pairwise(cuts)]))
