"""The share of the difference of the two log-probs that depends on the token id alone: a head, its bias, a bias by id.

The mean of d = log π − log μ of an id, over all contexts, is near 0 if the error is numeric. With a dropped head bias
83 % of the variance of d is between ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from foreshock.interval_names import between_ends
from foreshock.lint.counting import LARGEST_D, Counting, Counts, Table
from foreshock.lint.judging import Finding, Judging, format_number
from foreshock.measures.estimators.intervals import student_t_quantile
from foreshock.rollouts.schema import are_log_probs

_MOST_SAMPLED = 1 << 15
# The ids with the smallest hashes: the same ones in every shard.
_MOST_IDS, _HASH = 128, np.uint64(0x9E3779B97F4A7C15)
_LEAST_IDS, _LEAST_TOKENS_OF_ID, _LEAST_SHARE = 20, 2, 0.5
_IDS_NAMED = 4


class SumsById(Table):
    """Tokens, Σ d and Σ d² by token id, for an even sample of the ids."""

    COLUMNS = ("tokens", "d", "d_squared")

    def __add__(self, other: Self) -> Self:
        """Return the rows of both, for the sample of their ids."""
        both = super().__add__(other)
        return both.rows(np.sort(np.argsort(both.keys * _HASH)[:_MOST_IDS]))


@dataclass
class TokenIds(Counts):
    """Sums by token id over an even sample of the tokens."""

    sums: SumsById = field(default_factory=SumsById)

    def add_batch(self, counting: Counting) -> None:
        batch = counting.batch
        if batch.rollout_log_probs is None or batch.trainer_log_probs is None or not batch.num_tokens:
            return
        every = slice(None, None, -(-batch.num_tokens // _MOST_SAMPLED))
        mu, pi = batch.rollout_log_probs[every], batch.trainer_log_probs[every]
        ids = batch.response_token_ids[every]
        keep = are_log_probs(mu) & are_log_probs(pi) & (ids >= 0)
        if batch.response_mask is not None:
            keep &= batch.response_mask[every] != 0
        d = np.clip(np.subtract(pi[keep], mu[keep], dtype=np.float64), -LARGEST_D, LARGEST_D)
        self.sums += SumsById.of(ids[keep], np.ones(d.size), d, np.square(d))


def by_token_id(judging: Judging) -> Finding | None:
    """Return a finding if most of the variance of d is between token ids.

    The share is ε² of a one-way analysis of variance, with a jackknife over the ids.
    """
    sums = judging[TokenIds].sums
    sums = sums.rows(sums.column("tokens") >= _LEAST_TOKENS_OF_ID)
    if sums.keys.size < _LEAST_IDS:
        return None
    count, of_d, squares = sums.values.T
    # Σ n·m² of each id, and what is left of its Σ d².
    at_mean = np.square(of_d) / count
    inside = np.maximum(squares - at_mean, 0.0)

    def share_without(ids: int, *left_out: NDArray[np.float64] | float) -> NDArray[np.float64]:
        tokens, total, between, within = (
            column.sum() - left for column, left in zip((count, of_d, at_mean, inside), left_out, strict=True)
        )
        between = between - np.square(total) / tokens
        by_chance = (count.size - ids - 1) * within / (tokens - count.size + ids)
        return np.asarray((between - by_chance) / (between + within))

    share = float(share_without(0, 0.0, 0.0, 0.0, 0.0))
    each = share_without(1, count, of_d, at_mean, inside)
    error = math.sqrt((each.size - 1) / each.size * float(np.square(each - each.mean()).sum()))
    reach = student_t_quantile(0.975, each.size - 1) * error
    low, high = share - reach, min(share + reach, 1.0)
    if not low >= _LEAST_SHARE:
        return None
    means = of_d / count
    farthest = np.argsort(-np.abs(means), kind="stable")[:_IDS_NAMED]
    named = ", ".join(f"{sums.keys[place]} ({format_number(float(means[place]))})" for place in farthest)
    title = (
        f"the mismatch is by token id: {100.0 * share:.0f} % of its variance (range over the ids "
        f"{between_ends(f'{100.0 * low:.0f}', f'{100.0 * high:.0f}')} %)"
    )
    seen = (
        f"An id has about the same log π − log μ in every context; the largest means: {named}. It looks like the head: "
        "its bias, weights of another step, a bias by id, or another vocabulary."
    )
    numbers = {"share_of_ids": share, "share_low": low, "share_high": high, "ids": sums.keys.size}
    return Finding("warning", seen, numbers, title=title)
