"""A log π that follows the advantages: the trainer computed it after its update on the same rollouts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.checks.pairs import if_invalid
from foreshock.lint.counting import LARGEST_D, Counting, Counts
from foreshock.lint.judging import LEAST_GROUPS, Check, Clean, Finding, Judging, NotChecked, Outcome, format_number
from foreshock.measures.inputs import lag_of_tokens
from foreshock.rollouts.arrays import row_sums
from foreshock.rollouts.schema import are_log_probs

# The correlation with the advantages is above this by so many standard errors. Updates on other rollouts raise what is
# rewarded too: with weights of up to eight updates ago it was 0 to 0.4 on average.
_LEAST_CORRELATION, _ERRORS = 0.5, 3.0
# An update raises d where the advantage is positive, by about as much as it lowers it elsewhere. Old weights, or any
# other mismatch, lower d on average.
_LEAST_RISE = 0.25
# Between the two: less is of the size of numerics.
_LEAST_D = 0.01
# Equal responses of a prompt have equal rewards and equal d, so that they count once.
_LEAST_ROLLOUTS = 8


@dataclass
class FollowsAdvantages(Counts):
    """Sums over the rollouts at lag 0 or an unknown one: x is the advantage (without one, the reward) and y the mean d,
    each less its mean over the prompt group. Groups without a spread of x are left out."""

    rollouts: int = 0
    distinct: int = 0  # responses of a group that differ from each other
    groups: int = 0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0
    above: int = 0  # rollouts with x > 0, and their mean d added up
    d_above: float = 0.0
    d_below: float = 0.0

    def add_batch(self, counting: Counting) -> None:
        batch, offsets = counting.batch, counting.batch.response_offsets
        mu, pi = batch.rollout_log_probs, batch.trainer_log_probs
        logged = batch.reward if batch.advantage is None else batch.advantage
        if mu is None or pi is None or logged is None:
            return
        keep = are_log_probs(mu) & are_log_probs(pi) & batch.generated
        if (lags := lag_of_tokens(batch)) is not None:
            keep &= lags == 0
        counts = row_sums(keep, offsets)
        d = np.where(keep, np.clip(np.subtract(pi, mu, dtype=np.float64), -LARGEST_D, LARGEST_D), 0.0)
        of_rows: NDArray[np.floating[Any]] = logged
        if batch.advantage is not None and batch.advantage_per_token:
            of_rows = row_sums(np.where(keep, logged, 0.0), offsets) / np.maximum(counts, 1)
        rows = np.flatnonzero((counts > 0) & np.isfinite(of_rows))
        x, y = of_rows[rows].astype(np.float64), row_sums(d, offsets)[rows] / counts[rows]
        keys = counting.group_keys[rows] if batch.group_ids is not None else np.zeros(rows.size)
        _, groups = np.unique(keys, return_inverse=True)
        sizes = np.bincount(groups)
        x -= (np.bincount(groups, x) / sizes)[groups]
        centred = y - (np.bincount(groups, y) / sizes)[groups]
        spread = np.bincount(groups, np.abs(x)) > 1e-6 * sizes
        used = spread[groups]
        x, y, centred = x[used], y[used], centred[used]
        ids = row_sums(batch.response_token_ids, offsets)[rows]
        texts = np.stack([groups, ids, batch.response_lengths[rows]], axis=1)[used]
        self.add(rollouts=x.size, groups=spread, distinct=len(np.unique(texts, axis=0)))
        self.add(xx=x * x, yy=centred * centred, xy=x * centred)
        self.add(above=x > 0, d_above=y[x > 0], d_below=y[x <= 0])


def _check(judging: Judging) -> Outcome:
    found = judging[FollowsAdvantages]
    free, below = found.distinct - found.groups, found.rollouts - found.above
    if free < _LEAST_ROLLOUTS or found.groups < LEAST_GROUPS or found.yy == 0.0 or not below:
        return NotChecked("needs both log-probs, and advantages or rewards with a spread, of rollouts at lag 0")
    correlation = found.xy / math.sqrt(found.xx * found.yy)
    up, down = found.d_above / max(found.above, 1), found.d_below / below
    margin = math.atanh(min(max(correlation, -0.999), 0.999)) - math.atanh(_LEAST_CORRELATION)
    if margin < _ERRORS / math.sqrt(free - 3) or down > 0 or up < _LEAST_RISE * -down or up - down < _LEAST_D:
        return Clean()
    seen = (
        f"In {found.rollouts:,} rollouts the mean d follows the advantage within the prompt group: correlation "
        f"{format_number(correlation)}, and d averages {format_number(up)} where the advantage is above that of its "
        f"group and {format_number(down)} where it is below. An update on these rollouts makes that. Older weights in "
        "the engine do so less."
    )
    return Finding("warning", seen, {"correlation": correlation, "d_above": up, "d_below": down})


AFTER_UPDATE = Check(
    "taken_after_update",
    "log π looks as if it was taken after the update on the same rollouts",
    "The measures show the size of the update, not the mismatch, and PPO's ratio starts from the wrong weights.",
    "Compute old_log_probs before the optimizer's step on these rollouts: check the order of the calls.",
    _check,
    unless=if_invalid,
    yields_to=("temperature_of_trainer", "temperatures_differ", "processed_log_probs", "penalty_of_engine"),
    proven=False,
)
