"""The reduction of two tiles of logits on a CPU, compiled with numba, in float64, row by row.

A row is read from memory once and swept three times while it is in cache: likeliest tokens, normaliser, and the sums
that need both normalisers. Total variation cannot be rescaled afterwards, and the terms of the other sums avoid
cancellation only if log π − log μ is known. The rows are distributed over as many threads as torch uses; the result
does not depend on their number.
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

from foreshock_probes.exact_divergence.reduction import SUMS, TileSums
from foreshock_probes.exact_divergence.vector_math import (
    choose,
    curvature,
    curvatures,
    exponential,
    larger,
    number,
    prefer_wide_vectors,
    reduced,
)

__all__ = ["CompiledReduction"]

F = TypeVar("F", bound=Callable[..., Any])
# float32, float64, or int16 for the bits of bfloat16.
Logits = NDArray[Any]
Float64 = NDArray[np.float64]

# Log-probability of masked tokens: e^x is 0, and it is finite, so that the difference of two of them is 0.
_MASKED = -1e300
_SCANNED = 128  # tokens per comparison of their largest logit with the smallest of the top k
_CHUNK = 512  # tokens per call of `near_sums`, which needs |log π − log μ| <= _NEAR for all of them
_NEAR = 1.0  # the range of `curvatures`
_POLYNOMIAL = 0.3  # |log π − log μ| below which differences are computed by the polynomial
_EXHAUSTED = 700.0  # e^−x is 0 above it
_ROWS = 4  # rows per task of a thread


def _compiled(function: F, *flags: str) -> F:
    """Return the function, compiled on its first call.

    There is no cache on disk: numba does not recompile if only the imported `vector_math` changed.
    """
    made: F = numba.njit(nogil=True, error_model="numpy", fastmath=set(flags))(function)
    return made


def _largest(logits: Logits) -> float:
    prefer_wide_vectors()
    largest = number(logits[0])
    for index in range(1, logits.size):
        largest = larger(largest, number(logits[index]))
    return float(largest)


def _exponential_sum(logits: Logits, shift: float) -> float:
    prefer_wide_vectors()
    total = 0.0
    for index in range(logits.size):
        total += exponential(np.float64(number(logits[index])) - shift)
    return total


# With a NaN among the logits the largest is arbitrary; the sum of exponentials, and so every result, is then NaN.
largest_of = _compiled(_largest)
exponential_sum = _compiled(_exponential_sum, "reassoc", "nsz", "contract")


def _insert(logits: Logits, first_id: int, values: Float64, ids: NDArray[np.int64]) -> None:
    """Insert logits into `values` and `ids`, the top k so far in descending order; ties keep the lower id."""
    last = values.size - 1
    for index in range(logits.size):
        value = np.float64(number(logits[index]))
        if value > values[last]:
            place = last
            while place > 0 and value > values[place - 1]:
                values[place] = values[place - 1]
                ids[place] = ids[place - 1]
                place -= 1
            values[place] = value
            ids[place] = first_id + index


insert = _compiled(_insert)


def _normaliser(logits: Logits, values: Float64, ids: NDArray[np.int64]) -> tuple[float, float]:
    """Return the largest logit of a row [V] and log Σ e^(logit − largest); write the top k to `values` and `ids`."""
    values[:] = -math.inf
    ids[:] = -1
    largest = -math.inf
    for start in range(0, logits.size, _SCANNED):
        part = logits[start : start + _SCANNED]
        of_part = largest_of(part)
        largest = max(largest, of_part)
        if of_part > values[-1]:
            insert(part, start, values, ids)
    return largest, math.log(exponential_sum(logits, largest if largest > -math.inf else 0.0))


normaliser = _compiled(_normaliser)


def _near_sums(target: Logits, behaviour: Logits, shifts: Float64, log_totals: Float64, sums: Float64) -> bool:
    """Add a chunk to `sums` with one exponential per token; return False if |log π − log μ| > 1 for a token.

    With d = log π − log μ and c(x) = (e^x − 1 − x)/x²: π = μ + μ·(d + d²·c(d)), and terms of KL(μ‖π) are μ·d²·c(d).
    """
    prefer_wide_vectors()
    kl = reverse_kl = distance = chi2 = reverse_chi2 = target_entropy = behaviour_entropy = far = 0.0
    shift_target, shift_behaviour = shifts[0], shifts[1]
    log_target, log_behaviour = log_totals[0], log_totals[1]
    log_difference = log_target - log_behaviour
    for index in range(target.size):
        of_target = np.float64(number(target[index])) - shift_target
        of_behaviour = np.float64(number(behaviour[index])) - shift_behaviour
        d = (of_target - of_behaviour) - log_difference
        far += choose(abs(d) <= _NEAR, 0.0, 1.0)  # also if both are masked and d is NaN
        log_mu = of_behaviour - log_behaviour
        mu = exponential(log_mu)
        curve, curve_back = curvatures(d)
        square = d * d
        growth = d + square * curve  # π/μ − 1
        shrinkage = d - square * curve_back  # 1 − μ/π
        apart = mu * growth
        pi = mu + apart
        kl += mu * (square * curve)
        reverse_kl += pi * (square * curve_back)
        distance += abs(apart)
        chi2 += apart * growth
        reverse_chi2 += apart * shrinkage
        target_entropy -= pi * (of_target - log_target)
        behaviour_entropy -= mu * log_mu
    if far != 0.0:
        return False
    sums[0] += kl
    sums[1] += reverse_kl
    sums[2] += distance
    sums[3] += chi2
    sums[4] += reverse_chi2
    sums[5] += target_entropy
    sums[6] += behaviour_entropy
    return True


near_sums = _compiled(_near_sums, "reassoc", "nsz", "contract")


def _any_sums(target: Logits, behaviour: Logits, shifts: Float64, log_totals: Float64, sums: Float64) -> None:
    """Add any chunk to `sums`. `shifts` and `log_totals` [2] add up to the log-normalisers.

    They are subtracted one after the other, because logits of 1e4 would otherwise lose digits.

    With s = |log π − log μ|, `likelier` the larger of π and μ, and shrinkage w = 1 − e^−s: |π − μ| = likelier·w.
    """
    prefer_wide_vectors()
    kl = reverse_kl = distance = chi2 = reverse_chi2 = target_entropy = behaviour_entropy = uncovered = 0.0
    shift_target, shift_behaviour = shifts[0], shifts[1]
    log_target, log_behaviour = log_totals[0], log_totals[1]
    log_difference = log_target - log_behaviour
    for index in range(target.size):
        x = np.float64(number(target[index]))
        y = np.float64(number(behaviour[index]))
        only_behaviour = (x == -math.inf) & (y > -math.inf)
        only_target = (y == -math.inf) & (x > -math.inf)
        of_target = choose(x == -math.inf, _MASKED, x - shift_target)
        of_behaviour = choose(y == -math.inf, _MASKED, y - shift_behaviour)
        d = (of_target - of_behaviour) - log_difference
        log_pi = of_target - log_target
        log_mu = of_behaviour - log_behaviour
        below = d < 0.0
        s = abs(d)
        log_likelier = choose(below, log_mu, log_pi)
        likelier = exponential(log_likelier)
        r, scale = reduced(-s)
        curve = r * r * curvature(r)
        small = s < _POLYNOMIAL
        decay = choose(s > _EXHAUSTED, 0.0, scale + scale * (r + curve))
        w = choose(small, -(r + curve), 1.0 - decay)
        away = choose(small, curve, s - w)  # s − w
        toward = choose(small, w * s - curve, w - decay * s)  # e^−s·(e^s − 1 − s)
        smaller = likelier * decay
        quadratic = likelier * w * w
        inflated = exponential(log_likelier + s) * w * w  # (π − μ)² over the smaller
        kl += choose(only_behaviour, math.inf, likelier * choose(below, away, toward))
        reverse_kl += choose(only_target, math.inf, likelier * choose(below, toward, away))
        distance += likelier * w
        chi2 += choose(only_target, math.inf, choose(below, quadratic, inflated))
        reverse_chi2 += choose(only_behaviour, math.inf, choose(below, inflated, quadratic))
        target_entropy -= choose(below, smaller, likelier) * log_pi
        behaviour_entropy -= choose(below, likelier, smaller) * log_mu
        uncovered += choose(only_target, likelier, 0.0)
    sums[0] += kl
    sums[1] += reverse_kl
    sums[2] += distance
    sums[3] += chi2
    sums[4] += reverse_chi2
    sums[5] += target_entropy
    sums[6] += behaviour_entropy
    sums[7] += uncovered


any_sums = _compiled(_any_sums, "reassoc", "nsz", "contract")


def _reduce_rows(
    target: Logits,
    behaviour: Logits,
    shifts: Float64,
    log_totals: Float64,
    sums: Float64,
    values: Float64,
    ids: NDArray[np.int64],
) -> None:
    """Reduce rows of both tiles [rows, V].

    Writes `shifts` and `log_totals` [rows, 2], whose sums are the log-normalisers, `sums` [rows, len(SUMS)] and `ids`
    [2, rows, K]; `values` [K] is scratch memory.
    """
    for row in range(target.shape[0]):
        shifts[row, 0], log_totals[row, 0] = normaliser(target[row], values, ids[0, row])
        shifts[row, 1], log_totals[row, 1] = normaliser(behaviour[row], values, ids[1, row])
        if not math.isfinite(shifts[row].sum() + log_totals[row].sum()):
            sums[row] = math.nan
            continue
        sums[row] = 0.0
        for start in range(0, target.shape[1], _CHUNK):
            of_target = target[row, start : start + _CHUNK]
            of_behaviour = behaviour[row, start : start + _CHUNK]
            if not near_sums(of_target, of_behaviour, shifts[row], log_totals[row], sums[row]):
                any_sums(of_target, of_behaviour, shifts[row], log_totals[row], sums[row])
        sums[row, 2] = min(0.5 * sums[row, 2], 1.0)


reduce_rows = _compiled(_reduce_rows)


class CompiledReduction:
    """Reduction of `target` and `behaviour`, tiles [rows, V] of one dtype: bfloat16, float32 or float64."""

    def __init__(self, target: torch.Tensor, behaviour: torch.Tensor, top_k: int) -> None:
        self._tiles = (_as_array(target), _as_array(behaviour))
        self._top_k = top_k
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="exact-divergence")

    def reduce(self, rows: int) -> TileSums:
        shifts, log_totals = np.empty((rows, 2)), np.empty((rows, 2))
        sums = np.empty((rows, len(SUMS)))
        ids = np.empty((2, rows, self._top_k), dtype=np.int64)

        def reduce_part(part: slice) -> None:
            target, behaviour = self._tiles
            values = np.empty(self._top_k)
            reduce_rows(target[part], behaviour[part], shifts[part], log_totals[part], sums[part], values, ids[:, part])

        cuts = [*range(0, rows, _ROWS), rows]
        list(self._pool.map(reduce_part, [slice(first, stop) for first, stop in itertools.pairwise(cuts)]))
        log_normalisers = torch.from_numpy((shifts + log_totals).T)
        return TileSums(torch.from_numpy(sums), log_normalisers, torch.from_numpy(ids))

    def close(self) -> None:
        self._pool.shutdown()


def _as_array(tile: torch.Tensor) -> Logits:
    """Return the tile's memory as an array, bfloat16 as int16 bits, because numpy has no bfloat16."""
    bits = tile.view(torch.int16) if tile.dtype == torch.bfloat16 else tile
    array: Logits = bits.numpy()
    return array
