"""Update to noise: how far an update moves the policy, against the noise of the scorer that measures it.

The rollouts of a step are scored three times: with the weights that sampled them, with the same weights in other
batches (the noise floor), and with the weights after the update. Answers with more reward than the mean of their prompt
should have become likelier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.api.records import Record
from foreshock.diagnosis.wording import interval_text, number, plural
from foreshock.fingerprint import Fingerprint
from foreshock.json_values import number_or_nan
from foreshock.layer_divergence import Mean
from foreshock.measures.comparison import compare
from foreshock.measures.estimators.intervals import Interval, clustered_interval
from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock.rollouts import RolloutBatch

LEAST_GROUPS = 8
"""Least number of prompt groups of rewarded answers; with fewer, nothing is reported on their likelihood."""

_UNKNOWN = Interval(math.nan, math.nan, math.nan, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateToNoise(Record):
    """How far the updates from `step` to `after_step` moved the policy on the rollouts of `step`, in nats per token."""

    step: int
    after_step: int
    """the step whose weights are those after the update"""
    scorer: str
    rollouts: int
    tokens: int
    update_k3: Mean
    """k3 of the policy after the update against the one before"""
    floor_k3: Mean
    """k3 of the policy before, in other batches, against itself"""
    rewarded: int
    """rollouts with more reward than the mean of their prompt"""
    rewarded_groups: int
    rewarded_change: Mean
    """mean change of their log π, per token: below 0 they became less likely"""
    others_change: Mean
    """of the rollouts with less reward than the mean of their prompt"""
    before_fingerprint: dict[str, Any]
    after_fingerprint: dict[str, Any]

    @property
    def ratio(self) -> float:
        """Return k3 of the update over the noise floor; infinite without noise, NaN if one is unknown."""
        update, floor = self.update_k3.mean, self.floor_k3.mean
        if update is None or floor is None:
            return math.nan
        return update / floor if floor > 0.0 else math.inf

    def in_words(self) -> str:
        """Return what was found, in two sentences."""
        updates = plural(self.after_step - self.step, "update")
        update, floor = number_or_nan(self.update_k3.mean), number_or_nan(self.floor_k3.mean)
        against = "without any noise" if floor == 0.0 else f"{number(self.ratio)} × the noise floor of {number(floor)}"
        moved = f"{updates} moved the policy by k3 {number(update)} nats per token, {against}."
        change = self.rewarded_change
        if change.mean is None or not change.known or self.rewarded_groups < LEAST_GROUPS:
            return (
                f"{moved} Whether rewarded answers became likelier needs {LEAST_GROUPS} prompts with different "
                f"rewards, and {self.rewarded_groups} have them."
            )
        low, high = number_or_nan(change.low), number_or_nan(change.high)
        verdict = "lost likelihood" if high < 0.0 else "became likelier" if low > 0.0 else "did not clearly change"
        return (
            f"{moved} Answers with more reward than the mean of their prompt {verdict}: log π changed by "
            f"{number(change.mean)} nats per token ({interval_text(low, high)})."
        )


def measure_update(
    batch: RolloutBatch,
    before: NDArray[np.float32],
    again: NDArray[np.float32],
    after: NDArray[np.float32],
    *,
    steps: tuple[int, int],
    scorer: str,
    fingerprints: tuple[Fingerprint, Fingerprint],
) -> UpdateToNoise:
    """Return the measurement from log π [T] of the response tokens, before the update, before it again, and after.

    `steps` and `fingerprints` are those of the weights before and after.
    """
    moved, noise = (compare(batch, target, before).summaries for target in (after, again))
    centred = _centred_rewards(moved)
    rewarded = centred > 0.0
    return UpdateToNoise(
        step=steps[0],
        after_step=steps[1],
        scorer=scorer,
        rollouts=batch.num_rollouts,
        tokens=int(moved.column("n_tokens").sum()),
        update_k3=Mean.of(moved.k3_interval()),
        floor_k3=Mean.of(noise.k3_interval()),
        rewarded=int(rewarded.sum()),
        rewarded_groups=len(np.unique(moved.clusters()[rewarded])),
        rewarded_change=Mean.of(_change(moved, rewarded)),
        others_change=Mean.of(_change(moved, centred < 0.0)),
        before_fingerprint=fingerprints[0].to_dict(),
        after_fingerprint=fingerprints[1].to_dict(),
    )


def _centred_rewards(summaries: RolloutSummaries) -> NDArray[np.float64]:
    """Return each rollout's reward minus the mean of its prompt, [N]; NaN without a reward, 0 if it is the only one."""
    rewards = summaries.column("reward").astype(np.float64)
    _, groups = np.unique(summaries.clusters(), return_inverse=True)
    known = np.isfinite(rewards)
    counts = np.bincount(groups[known], minlength=groups.max(initial=-1) + 1)
    sums = np.bincount(groups[known], weights=rewards[known], minlength=counts.size)
    return np.asarray(rewards - (sums / np.maximum(counts, 1))[groups])


def _change(summaries: RolloutSummaries, chosen: NDArray[np.bool_]) -> Interval:
    if not chosen.any():
        return _UNKNOWN
    sums, tokens = summaries.column("sum_d")[chosen], summaries.column("n_tokens")[chosen]
    return clustered_interval(sums, tokens, summaries.clusters()[chosen])
