"""A scorer in two environments: the size of what the environment alone changes, and what it does not explain."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.measures.estimators import token
from foreshock.measures.estimators.bootstrap import bootstrap_interval, bootstrap_intervals
from foreshock.measures.inputs import check_size, cuts_of, group_names, numbers_of

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EnvironmentLink:
    """The link `scorer@second / scorer@first`, d = log second − log first, in nats per token.

    `share` is E[d_link·d]/E[d²] with d of the whole chain, and the ends of its bootstrap-t interval by prompt group;
    NaN without the whole. `tokens` are those that all of these scores have.
    """

    k3_kl: float
    rms_d: float
    max_abs_d: float
    share: float
    share_low: float
    share_high: float
    tokens: int


def environment_link(
    first: ArrayLike,
    second: ArrayLike,
    whole: tuple[ArrayLike, ArrayLike] | None,
    offsets: ArrayLike,
    mask: ArrayLike | None = None,
    group_ids: Iterable[object] | None = None,
) -> EnvironmentLink:
    """Return the link between two replays of a scorer, [T] over the tokens of N rollouts cut at `offsets` [N + 1].

    `whole` has the last and the first score of the chain, [T] each. Values that are not finite are excluded with their
    token. Raises InvalidRolloutsError if sizes or types do not fit.
    """
    scores = [first, second, *(whole or ())]
    arrays, starts, _, groups = _shared(scores, offsets, mask, group_ids)
    d = arrays[1] - arrays[0]
    if not d.size:
        nan = math.nan
        return EnvironmentLink(nan, nan, nan, nan, nan, nan, tokens=0)
    share, low, high = math.nan, math.nan, math.nan
    if whole is not None:
        of_whole = arrays[2] - arrays[3]
        products = [np.add.reduceat(values * of_whole, starts) for values in (d, of_whole)]
        if products[1].sum() > 0.0:
            found = bootstrap_intervals(products[0][:, None], products[1], groups)[0]
            share, low, high = found.mean, found.low, found.high
    k3, rms, largest = float(token.k3_kl(d).mean()), float(np.sqrt(np.square(d).mean())), float(np.abs(d).max())
    return EnvironmentLink(k3, rms, largest, share, low, high, d.size)


def excess_over_environments(
    logged: ArrayLike,
    first: ArrayLike,
    second: ArrayLike,
    offsets: ArrayLike,
    mask: ArrayLike | None = None,
    group_ids: Iterable[object] | None = None,
) -> tuple[float, float, float]:
    """Return ½{E[(r₁ − a)(r₂ − a)] − ½E[(r₁ − r₂)²]} with its bootstrap-t interval by prompt group.

    `logged` is a, a score of the run; `first` and `second` are r₁ and r₂, its replays in two environments other than
    the run's; all [T] log-probs in nats. The result is in nats per token, comparable with k3 of small differences.

    With a = t + e₀ and rᵢ = t + s + eᵢ, where t is common, s the difference that is no environment's, and e₀, e₁ and e₂
    what each environment adds, E[(r₁ − a)(r₂ − a)] = E[s²] + E[e₀²] and ½E[(r₁ − r₂)²] = ½(E[e₁²] + E[e₂²]), if s and
    the e are uncorrelated. **If the three environments are exchangeable** (E[e₀²] = E[e₁²] = E[e₂²]) the result is
    ½E[s²], and 0 in expectation if the environments explain everything. It may be negative and is never clamped. Two
    replays cannot test the assumption. The bounds are NaN with too few prompt groups.
    """
    arrays, starts, lengths, groups = _shared([logged, first, second], offsets, mask, group_ids)
    a, r1, r2 = arrays
    if not a.size:
        return math.nan, math.nan, math.nan
    terms = 0.5 * ((r1 - a) * (r2 - a) - 0.5 * np.square(r1 - r2))
    found = bootstrap_interval(np.add.reduceat(terms, starts), lengths, groups)
    return found.mean, found.low, found.high


def _shared(
    scores: Iterable[ArrayLike], offsets: ArrayLike, mask: ArrayLike | None, group_ids: Iterable[object] | None
) -> tuple[list[Float64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the scores at the tokens that all have, the rollouts' starts and lengths, and their prompt groups."""
    cuts = cuts_of(offsets)
    arrays = [numbers_of("scores", value).astype(np.float64) for value in scores]
    for array in arrays:
        check_size("scores", array, int(cuts[-1]))
    keep = np.ones(int(cuts[-1]), np.bool_) if mask is None else numbers_of("response_mask", mask) != 0
    for array in arrays:
        keep &= np.isfinite(array)
    running = np.concatenate([np.zeros(1, np.int64), np.cumsum(keep, dtype=np.int64)])
    lengths = np.diff(running[cuts])
    rows = np.flatnonzero(lengths)
    names = group_names(group_ids, cuts.size - 1)
    keys = [f"r{row}" if names[row] is None else f"g{names[row]}" for row in rows.tolist()]
    numbers: dict[str, int] = {}
    groups = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
    lengths = lengths[rows]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)[:-1]]) if lengths.size else lengths
    return [array[keep] for array in arrays], starts, lengths, groups
