"""Rows in another order: log π of a rollout fits log μ of another rollout of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.checks.pairs import if_copied
from foreshock.lint.counting import Counting, Counts
from foreshock.lint.judging import Check, Clean, Finding, Judging, Outcome, format_number
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.schema import are_log_probs

_MOST_ROWS, _MOST_TOKENS, _LEAST_TOKENS = 128, 32, 8
_FAR = 0.3
"""Nats: a rollout whose mean |d| is below this has its own log π."""
_FITS = 0.25
"""Another rollout fits if its mean |d| is at most this part of the own one, and of that of the next best rollout."""
_LEAST_ROWS, _LEAST_SHARE = 4, 0.05
_NAME = "rows_exchanged"


@dataclass
class RowOrder(Counts):
    """Rollouts whose log π was compared with the log μ of all others of their batch."""

    rows: int = 0
    moved: int = 0  # of these: another rollout fits, and not the own one
    own: float = 0.0  # Σ over the moved ones of the mean |d|: against the own log μ, and that which fits
    other: float = 0.0

    def add_batch(self, counting: Counting) -> None:
        """Compare the first tokens of the first rollouts, if they are far apart in some."""
        starts = _first_tokens(counting.batch)
        if starts is None:
            return
        rows, behaviour, target = starts
        self.rows += rows.size
        own = _means(np.abs(target - behaviour))
        far = np.flatnonzero(own > _FAR)
        if rows.size < 3 or far.size < 2:
            return
        gaps = np.stack([_means(np.abs(target[row] - behaviour)) for row in far])
        gaps[np.arange(far.size), far] = np.inf
        best = gaps.argmin(axis=1)
        two = np.partition(gaps, 1, axis=1)
        moved = (two[:, 0] <= _FITS * own[far]) & (two[:, 0] <= _FITS * two[:, 1])
        self.add(moved=moved, own=own[far][moved], other=two[moved, 0])
        for place in np.flatnonzero(moved)[:3].tolist():
            row, other = (counting.batch.sample_ids[rows[each]] for each in (far[place], best[place]))
            counting.add_example(_NAME, row, text=f"log π fits log μ of {other}")


def _first_tokens(
    batch: RolloutBatch,
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]] | None:
    """Return rows [N], and the log μ and log π of their first tokens [N, 32], NaN where there is none."""
    if batch.rollout_log_probs is None or batch.trainer_log_probs is None or not batch.num_tokens:
        return None
    starts, ends = batch.response_offsets[:-1][:_MOST_ROWS, None], batch.response_offsets[1:][:_MOST_ROWS, None]
    places = starts + np.arange(_MOST_TOKENS)
    inside = places < ends
    places = np.minimum(places, batch.num_tokens - 1)
    inside &= batch.generated[places]
    pair = [
        np.where(inside & are_log_probs(column[places]), column[places].astype(np.float64), np.nan)
        for column in (batch.rollout_log_probs, batch.trainer_log_probs)
    ]
    rows = np.flatnonzero((np.isfinite(pair).sum(axis=2) >= _LEAST_TOKENS).all(axis=0))
    return rows, pair[0][rows], pair[1][rows]


def _means(gaps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over the tokens that both have, [N]; infinite if these are too few."""
    known = np.isfinite(gaps)
    counts = known.sum(axis=1)
    sums = np.where(known, gaps, 0.0).sum(axis=1)
    return np.asarray(np.where(counts >= _LEAST_TOKENS, sums / np.maximum(counts, 1), np.inf))


def _check(judging: Judging) -> Outcome:
    found = judging[RowOrder]
    if found.moved < max(_LEAST_ROWS, _LEAST_SHARE * found.rows):
        return Clean()
    seen = (
        f"log π of {found.moved:,} of {found.rows:,} rollouts fits log μ of another rollout of the batch: mean |d| is "
        f"{format_number(found.other / found.moved)} there, and {format_number(found.own / found.moved)} in its own "
        "row."
    )
    return Finding("critical", seen, {"rollouts": found.rows, "moved": found.moved})


EXCHANGED = Check(
    _NAME,
    "log-probs belong to other rollouts of the batch",
    "Every measure compares different responses.",
    "Keep the order of rows between sampling and the pass that scores them: look for a sort by length, a balancing of "
    "batches over ranks, or a shuffle, and undo it before logging and before the loss.",
    _check,
    unless=if_copied,
)
