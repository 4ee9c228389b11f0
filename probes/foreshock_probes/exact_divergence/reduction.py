"""The compiled loop that reduces two logits to sums over the vocabulary, row by row, in float64.

Import this module only after vLLM was started: on a CPU vLLM 0.32 looks into the attributes of all loaded modules, and
fails at those of numba's library.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

# Log-prob of masked tokens. e^x of it is 0; it is finite, so that the difference of two of them is 0, not NaN.
MASKED = -1e300
# |log π − log μ| below which e^x − 1 − x is computed by a polynomial, and its coefficients, from x² on.
POLYNOMIAL = 0.3
COEFFICIENTS = tuple(1.0 / math.factorial(power) for power in range(2, 14))
_LEAST = 1e-290  # a smaller number may have lost digits

Array = NDArray[Any]
Float64 = NDArray[np.float64]
F = TypeVar("F", bound=Callable[..., Any])


def _compiled(function: F) -> F:
    """Compile the function at its first call."""
    made: F = numba.njit(nogil=True, error_model="numpy")(function)
    return made


@_compiled
def normaliser(logits: Array) -> tuple[float, float, int]:
    """Return the largest logit of a row [V], log Σ e^(logit − largest), and the likeliest token.

    Of equal ones it is the first, −1 if all are −∞. A NaN logit makes the sum NaN, and with it every result of the row.
    """
    largest, likeliest = -math.inf, -1
    for index in range(logits.size):
        if logits[index] > largest:
            largest, likeliest = float(logits[index]), index
    shift = largest if likeliest >= 0 else 0.0
    total = 0.0
    for index in range(logits.size):
        total += math.exp(float(logits[index]) - shift)
    return largest, math.log(total), likeliest


@_compiled
def sums_of(target: Array, behaviour: Array, shifts: Float64, log_totals: Float64, sums: Float64) -> None:
    """Write the sums of a row. `shifts` + `log_totals` [2] are the log-normalisers.

    The two parts are subtracted one after the other, because logits of 1e4 would otherwise lose digits. With s = |d|,
    `likelier` the larger of π and μ, and w = 1 − e^−s: |π − μ| = likelier·w.
    """
    kl = reverse_kl = tv = chi2 = reverse_chi2 = target_entropy = behaviour_entropy = uncovered = 0.0
    log_difference = log_totals[0] - log_totals[1]
    for index in range(target.size):
        x, y = float(target[index]), float(behaviour[index])
        if x == -math.inf and y == -math.inf:
            continue
        of_target = MASKED if x == -math.inf else x - shifts[0]
        of_behaviour = MASKED if y == -math.inf else y - shifts[1]
        d = (of_target - of_behaviour) - log_difference
        log_pi, log_mu = of_target - log_totals[0], of_behaviour - log_totals[1]
        s = abs(d)
        log_likelier = log_mu if d < 0.0 else log_pi
        likelier = math.exp(log_likelier)
        if s < POLYNOMIAL:
            curve = 0.0  # e^−s − 1 + s
            for coefficient in COEFFICIENTS[::-1]:
                curve = coefficient - s * curve
            curve *= s * s
            w = s - curve
            decay, away, toward = 1.0 - w, curve, w * s - curve
        else:
            decay = math.exp(-s)
            w = 1.0 - decay
            away, toward = s - w, w - (decay * s if decay > 0.0 else 0.0)
        quadratic = likelier * w * w
        precise = decay > _LEAST and likelier > _LEAST
        inflated = quadratic / decay if precise else math.exp(log_likelier + s) * w * w  # (π − μ)² over the smaller
        pi, mu = (likelier * decay, likelier) if d < 0.0 else (likelier, likelier * decay)
        kl += math.inf if x == -math.inf else likelier * (away if d < 0.0 else toward)
        reverse_kl += math.inf if y == -math.inf else likelier * (toward if d < 0.0 else away)
        tv += 0.5 * likelier * w
        chi2 += math.inf if y == -math.inf else quadratic if d < 0.0 else inflated
        reverse_chi2 += math.inf if x == -math.inf else inflated if d < 0.0 else quadratic
        target_entropy -= pi * log_pi
        behaviour_entropy -= mu * log_mu
        uncovered += pi if y == -math.inf else 0.0
    sums[:] = (kl, reverse_kl, min(tv, 1.0), chi2, reverse_chi2, target_entropy, behaviour_entropy, uncovered)


@_compiled
def reduce_rows(
    target: Array, behaviour: Array, log_normalisers: Float64, sums: Float64, likeliest: NDArray[np.int64]
) -> None:
    """Reduce rows of both logits [rows, V]: write `log_normalisers` [2, rows], `sums` and `likeliest` [2, rows]."""
    shifts, log_totals = np.empty(2), np.empty(2)
    for row in range(target.shape[0]):
        shifts[0], log_totals[0], likeliest[0, row] = normaliser(target[row])
        shifts[1], log_totals[1], likeliest[1, row] = normaliser(behaviour[row])
        log_normalisers[:, row] = shifts + log_totals
        if math.isfinite(log_normalisers[:, row].sum()):
            sums_of(target[row], behaviour[row], shifts, log_totals, sums[row])
        else:
            sums[row] = math.nan
