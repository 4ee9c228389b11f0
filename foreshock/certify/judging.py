"""The verdict on two sets of log-probs of the same tokens: identical, rounding, or different.

The floor is measured on the same tokens: the model is replayed in several precisions that are all right, and two right
computations may differ by two roundings. Rounding hides at tokens at which it decides little: a second test counts
tokens by how well the precisions agree on them. `foreshock.doctor.floors` uses both, with the same factors. A third one
has a direction: rounding does not know which tokens occurred before, and a penalty of the engine moves only these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.certify.certificate import CLIP, ESS_TOKENS, Prompt, Size, Verdict
from foreshock.doctor.evidence import LARGEST, RESOLUTION, Compared, Float64, contrast_range, mean_range, steadiness
from foreshock.doctor.floors import OTHER_KERNELS, TWO_ROUNDINGS
from foreshock.lint.checks.penalty import occurred
from foreshock.measures.estimators.bootstrap import nonnegative_intervals
from foreshock.measures.estimators.token import k3_kl, log_ratio
from foreshock.rollouts import RolloutBatch

LogProbs = NDArray[np.float32]
_LEAST_PROMPTS = 8
"""Prompts that must have a token that occurred before, and as many that must have a new one, to compare the two."""


def judged(
    batch: RolloutBatch,
    one: LogProbs,
    other: LogProbs,
    replays: Sequence[LogProbs],
    dtype: str,
    chosen: NDArray[np.bool_] | None = None,
) -> tuple[Verdict, Size]:
    """Return the verdict on the log-probs [T] of two computations, and the size of their difference.

    `replays` are right computations of the same tokens in the precisions that may be usual. `chosen` [T]: only these
    tokens count.
    """
    compared = Compared.of(batch, other)
    values = [each.astype(np.float64) for each in replays]
    usable = compared.usable if chosen is None else compared.usable & chosen
    # Whether a token at the edge of a truncation is in it, is a matter of rounding.
    removed = [np.isneginf(each) for each in values]
    usable &= np.logical_and.reduce(removed) | ~np.logical_or.reduce(removed)
    compared = compared.having(compared.logged, np.where(usable, 0.0, np.nan))
    wide = one.astype(np.float64)
    halves = compared.halves(wide)
    weights = steadiness(values, compared) if len(values) > 1 else np.ones(halves.size)
    pairs = list(itertools.combinations(values, 2))
    floors = [(each, each.halves(second)) for each, second in ((compared.having(*pair), pair[1]) for pair in pairs)]
    plain = max([mean_range(halves_of, each)[1] for each, halves_of in floors], default=0.0)
    steady = max([mean_range(weights * halves_of, each)[1] for each, halves_of in floors], default=0.0)
    # In float32 a change of the computation is far larger than rounding: room for other kernels costs no power.
    is_float32 = dtype == "float32"
    floor = max(TWO_ROUNDINGS * (OTHER_KERNELS if is_float32 else 1.0) * plain, RESOLUTION)
    steady_floor = max(TWO_ROUNDINGS * OTHER_KERNELS * steady, RESOLUTION)
    low, high = mean_range(halves, compared)
    steady_low = mean_range(weights * halves, compared)[0]
    repeated, repeated_floor = _repeated(compared, wide, pairs)
    size = Size(
        dtype=dtype,
        half_square_low=low,
        half_square_high=high,
        floor=floor,
        steady=steady_low,
        steady_floor=steady_floor,
        repeated=repeated,
        repeated_floor=repeated_floor,
        **_sizes(compared, wide, halves),
    )
    if size.equal == 1.0:
        return "identical", size
    beyond = low > floor or (not is_float32 and (steady_low > steady_floor or abs(repeated) > repeated_floor))
    return ("different" if beyond else "rounding"), size


def _repeated(compared: Compared, one: Float64, pairs: Sequence[tuple[Float64, Float64]]) -> tuple[float, float]:
    """Return mean d at tokens that occurred before, less that at new ones, at the end nearest to 0, and its floor."""
    again = occurred(compared.batch, slice(0, compared.batch.num_rollouts))
    if any(np.unique(compared.groups[compared.usable & each]).size < _LEAST_PROMPTS for each in (again, ~again)):
        return math.nan, math.nan

    def interval(mine: Float64, logged: Float64) -> tuple[float, float]:
        having = compared.having(logged, mine)
        with np.errstate(invalid="ignore"):
            d = np.where(having.usable, np.clip(mine - logged, -LARGEST, LARGEST), 0.0)
        return contrast_range(np.nan_to_num(d), again, having)

    low, high = interval(one, compared.logged)
    floor = math.sqrt(TWO_ROUNDINGS * OTHER_KERNELS) * max(
        [abs(end) for pair in pairs for end in interval(*pair)], default=0.0
    )
    return (low if low > 0 else min(high, 0.0)), floor


def _sizes(compared: Compared, wide: Float64, halves: Float64) -> dict[str, Any]:
    """Return the fields of `Size` that no floor decides."""
    usable = compared.usable & np.isfinite(wide)
    d = log_ratio(wide.astype(np.float32), compared.logged.astype(np.float32))[usable]
    count = max(int(usable.sum()), 1)
    groups = compared.groups[usable]
    number = int(compared.groups.max(initial=0)) + 1
    sizes = np.bincount(groups, minlength=number)
    with np.errstate(over="ignore"):
        sums_of_k3 = np.asarray(np.bincount(groups, k3_kl(d), number), np.float64)
        (k3,) = nonnegative_intervals(sums_of_k3[:, None], sizes)
        ratios = np.exp(d)
    names = [""] * number
    for row, group in zip(compared.rows.tolist(), compared.groups.tolist(), strict=True):
        names[group] = names[group] or str((compared.batch.group_ids or compared.batch.sample_ids)[row])
    sums = np.bincount(compared.groups, halves, number)
    return {
        "tokens": int(usable.sum()),
        "equal": float((d == 0.0).sum() / count),
        "k3": k3.mean,
        "k3_low": k3.low,
        "k3_high": k3.high,
        "largest": float(np.abs(d).max(initial=0.0)),
        "beyond_clip": float((np.abs(ratios - 1.0) > CLIP).sum() / count),
        "ess": _ess(ratios),
        "half_square": float(halves.sum()) / count,
        "prompts": tuple(
            Prompt(name=names[group], tokens=int(sizes[group]), half_squares=float(sums[group]))
            for group in np.flatnonzero(sizes)
        ),
    }


def _ess(ratios: Float64) -> float:
    """Return (E ρ)²/E ρ² of a token, to the power of the tokens; NaN without a token."""
    if not ratios.size:
        return math.nan
    share = float(np.mean(ratios)) ** 2 / float(np.mean(np.square(ratios)))
    return math.exp(ESS_TOKENS * math.log(share)) if share > 0 else math.nan


def largest_tokens(batch: RolloutBatch, engine: LogProbs, trainer: LogProbs, count: int = 3) -> str:
    """Return the tokens that differ most, as a sentence."""
    d = np.nan_to_num(np.abs(engine.astype(np.float64) - trainer))
    rows = np.repeat(np.arange(batch.num_rollouts), batch.response_lengths)
    named = [
        f"id {batch.response_token_ids[token]} at place {token - batch.response_offsets[rows[token]]} of rollout "
        f"{batch.sample_ids[rows[token]]} ({engine[token]:.4g}, {trainer[token]:.4g})"
        for token in np.argsort(-d, kind="stable")[:count].tolist()
    ]
    return f"The tokens that differ most, with the log-probs of engine and trainer: {'; '.join(named)}."
