"""A step's means without its largest token, so that one token of thousands does not decide.

Means of ρ − 1 − d, ρ and their squares have no bound: one token of 12,800 with a d of 7.2 moves k3 by 0.1, a hundred
times the range. A mismatch is in many tokens, so rules judge the means of the others. Means of |d| need no such care.
"""

import math
from collections.abc import Callable, Mapping
from typing import Final

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.lags import K3_KEYS, TOKENS_KEYS
from foreshock.diagnosis.mismatch_rules import K3, K3_PER_ENTROPY

_TOKENS, _MIN_D, _MAX_D, _CHI2, _REVERSE_CHI2, _MEAN_RATIO, _ASYMMETRY, _ESS = (
    f"{TRAINER_ROLLOUT}:{measure}"
    for measure in (
        "tokens", "min_d", "max_d", "chi2_token", "reverse_chi2_token", "mean_ratio", "tail_asymmetry_ln2", "ess_token",
    )
)  # fmt: skip

LARGEST_TOKEN_KEYS: Final = frozenset({_TOKENS, _MIN_D, _MAX_D, _MEAN_RATIO})
"""The quantities that `without_largest_token` reads besides those that it changes."""

_ROUNDING, _LARGEST_ERROR = 1e-13, 1e-6
"""This fraction of a sum may be rounding; a mean with a larger error is not judged (thresholds are at least 1e-4)."""


def _exp(value: float) -> float:
    return math.exp(value) if value < 700.0 else math.inf


# The term of a token in each mean by its d; the magnitude of each is largest at one of the two extremes of d.
_TERMS: Final[Mapping[str, Callable[[float], float]]] = {
    K3: lambda d: math.expm1(d) - d if d < 700.0 else math.inf,
    _CHI2: lambda d: math.expm1(d) ** 2 if d < 350.0 else math.inf,
    _REVERSE_CHI2: lambda d: 4.0 * math.sinh(d / 2.0) ** 2 if abs(d) < 700.0 else math.inf,
    _MEAN_RATIO: _exp,
    _ASYMMETRY: lambda d: -_exp(d) if d > math.log(2.0) else 0.0,
}


def without_largest_token(values: Mapping[str, float]) -> Mapping[str, float]:
    """Return the values of a step with k3, χ², mean ρ, the asymmetry of the tails and ESS of trainer/rollout over all
    tokens but the largest.

    Each is without the token that moves it most. The lag of that token is not known: k3 at a lag is without it if the
    sum at this lag is so large that the token may be in it. A value is left out if the rounding of the sum hides the
    other tokens.
    Values stay as they are without the step's number of tokens and its extremes of d: a trainer that reports
    its own k3 does not report these.
    """
    tokens, low, high = (values.get(key, math.nan) for key in (_TOKENS, _MIN_D, _MAX_D))
    if not (tokens >= 2 and math.isfinite(low) and math.isfinite(high)):
        return values
    found = dict(values)
    squares = _sum_of_squares(values, tokens)
    for key, term_of in _TERMS.items():
        if key in values:
            term = max(term_of(low), term_of(high), key=abs)
            _put(found, key, _mean_without(term, values[key], tokens))
    largest_k3 = max(map(_TERMS[K3], (low, high)))
    for lag, key in K3_KEYS.items():
        count, of_lag = values.get(TOKENS_KEYS[lag], 0.0), values.get(key, math.nan)
        if count >= 2 and of_lag * count >= largest_k3:
            _put(found, key, _mean_without(largest_k3, of_lag, count))
    if K3_PER_ENTROPY in values and values.get(K3, 0.0) > 0.0:
        scaled = None if K3 not in found else values[K3_PER_ENTROPY] * found[K3] / values[K3]
        _put(found, K3_PER_ENTROPY, scaled)
    if squares is not None:
        rest = _mean_without(_exp(2.0 * high), squares / tokens, tokens)
        mean = found.get(_MEAN_RATIO)
        _put(found, _ESS, None if not rest or mean is None else mean * mean / rest)
    return found


def _sum_of_squares(values: Mapping[str, float], tokens: float) -> float | None:
    """Return Σ ρ², from ESS = (Σ ρ)² / (N Σ ρ²)."""
    ess, mean = values.get(_ESS, math.nan), values.get(_MEAN_RATIO, math.nan)
    return tokens * mean * mean / ess if ess > 0.0 and math.isfinite(mean) else None


def _mean_without(term: float, mean: float, tokens: float) -> float | None:
    """Return the mean of the other tokens' terms; None if the rounding of the sum hides it."""
    whole = mean * tokens
    rest = whole - term
    if not math.isfinite(rest) or _ROUNDING * abs(whole) / (tokens - 1.0) > _LARGEST_ERROR:
        return None
    # A sum of terms of one sign keeps it.
    return (max(rest, 0.0) if term >= 0.0 else rest) / (tokens - 1.0)


def _put(found: dict[str, float], key: str, value: float | None) -> None:
    if value is None:
        found.pop(key, None)
    else:
        found[key] = value
