"""Advantages that do not fit the rewards: of other groups, of the opposite sign, or far too large."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from foreshock.lint.counting import Counting, Counts, Table, largest
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome, format_number

_LEAST_SETS, _SHARE = 4, 0.1
# Rounding of float32 aside, equal rewards give equal advantages.
_TOLERANCE = 1e-3
# A correlation of advantage and reward below this, in this share of the groups.
_AGAINST, _NEARLY_ALL = -0.5, 0.9
# A mean advantage beyond this part of their root mean square is not 0.
_BESIDE_ZERO = 0.05
# Generalised advantage estimation with a discount may add some rewards up.
_LEAST_ROLLOUTS, _TIMES_THE_BOUND = 8, 10.0


class EqualRewards(Table):
    """Rollouts, and the least advantage negated and the largest, by prompt group and reward."""

    COLUMNS = ("rollouts", "minus_min", "max")
    LARGEST = 2


class SumsByGroup(Table):
    """Sums of the rewards r and the advantages A of a prompt group's rollouts."""

    COLUMNS = ("rollouts", "r", "rr", "a", "aa", "ra")


@dataclass
class Advantages(Counts):
    """The advantages of a step: of a group's rollouts with equal rewards, of its groups, and the largest one."""

    sets: EqualRewards = field(default_factory=EqualRewards)
    groups: SumsByGroup = field(default_factory=SumsByGroup)
    rewarded: int = 0  # rollouts with a reward
    most: float = largest()  # |A|, per token too
    minus_least_reward: float = largest()
    largest_reward: float = largest()

    def add_batch(self, counting: Counting) -> None:
        """Count the advantages of a batch; those per token need not be relative to a group."""
        batch = counting.batch
        if batch.advantage is None or batch.reward is None:
            return
        known, rewards = batch.advantage[np.isfinite(batch.advantage)], batch.reward[np.isfinite(batch.reward)]
        self.most = max(self.most, float(np.abs(known).max(initial=-np.inf)))
        self.rewarded += rewards.size
        self.minus_least_reward = max(self.minus_least_reward, -float(rewards.min(initial=np.inf)))
        self.largest_reward = max(self.largest_reward, float(rewards.max(initial=-np.inf)))
        if batch.advantage_per_token or batch.group_ids is None:
            return
        rows = np.flatnonzero(np.isfinite(batch.advantage) & np.isfinite(batch.reward))
        bits = np.ascontiguousarray(batch.reward[rows], np.float32).view(np.uint32).astype(np.uint64)
        advantage = batch.advantage[rows]
        keys = counting.group_keys[rows] ^ (bits << np.uint64(32))
        self.sets += EqualRewards.of(keys, np.ones(rows.size), -advantage, advantage)
        r, wide = batch.reward[rows].astype(np.float64), advantage.astype(np.float64)
        self.groups += SumsByGroup.of(
            counting.group_keys[rows], np.ones(rows.size), r, r * r, wide, wide * wide, r * wide
        )

    def across_steps(self) -> Self:
        """Return no counts: groups are compared within a step only."""
        return type(self)()


def _check(judging: Judging) -> Outcome:
    """Check for rollouts of one group with equal rewards and different advantages."""
    rollouts, minus_min, largest = judging[Advantages].sets.values.T
    several = rollouts > 1
    spread = (largest + minus_min)[several]
    if spread.size < _LEAST_SETS:
        return NotChecked("needs reward, group_id and an advantage for each rollout")
    scale = float(np.maximum(largest, minus_min).max())
    differ = int((spread > _TOLERANCE * scale).sum())
    if differ < max(_LEAST_SETS, _SHARE * spread.size):
        return _baseline(judging[Advantages].groups)
    seen = (
        f"In {differ:,} of {spread.size:,} sets of rollouts with one group and one reward the advantages differ, by up "
        f"to {spread.max():.2g}."
    )
    return Finding("info", seen, {"sets": spread.size, "differ": differ})


def _baseline(groups: SumsByGroup) -> Outcome:
    """Return a finding if groups whose rewards are all equal have advantages: they are relative to the batch."""
    count, r, rr, a, aa, _ = groups.values.T
    equal = (count > 1) & (rr * count - r * r <= _TOLERANCE * rr * count)
    mean = np.abs(a[equal]) / count[equal]
    scale = math.sqrt(float(aa.sum()) / max(float(count.sum()), 1.0))
    beside = int((mean > _BESIDE_ZERO * scale).sum())
    if beside < _LEAST_SETS or beside < _NEARLY_ALL * mean.size:
        return Clean()
    seen = (
        f"In {beside:,} of {mean.size:,} groups whose rewards are all equal the advantages are not 0, but up to "
        f"{mean.max():.2g}."
    )
    return Finding("info", seen, {"groups": mean.size, "beside": beside}, title=_OF_BATCH, remedy=_TO_BATCH)


def _check_sign(judging: Judging) -> Outcome:
    """Check for advantages that fall with the reward within nearly all groups."""
    count, r, rr, a, aa, ra = judging[Advantages].groups.values.T
    with np.errstate(all="ignore"):
        correlation = (ra - r * a / count) / np.sqrt((rr - r * r / count) * (aa - a * a / count))
    correlation = correlation[np.isfinite(correlation) & (count > 1)]
    if correlation.size < _LEAST_SETS:
        return NotChecked("needs reward, group_id and an advantage for each rollout, and groups with a spread")
    against = int((correlation < _AGAINST).sum())
    if against < _NEARLY_ALL * correlation.size:
        return Clean()
    seen = f"In {against:,} of {correlation.size:,} groups the advantage is lower where the reward is higher."
    return Finding("warning", seen, {"groups": correlation.size, "against": against})


def _check_size(judging: Judging) -> Outcome:
    """Check for an advantage that neither the range of the rewards nor a normalisation by a deviation can make."""
    found = judging[Advantages]
    if found.rewarded < _LEAST_ROLLOUTS or not math.isfinite(found.most):
        return NotChecked("needs rewards and advantages")
    spread, normalised = found.largest_reward + found.minus_least_reward, math.sqrt(found.rewarded)
    if found.most <= _TIMES_THE_BOUND * max(spread, normalised):
        return Clean()
    largest = format_number(found.most)
    seen = (
        f"|advantage| is up to {largest}. The rewards are within {format_number(spread)} of each other, and if it is "
        f"normalised by their deviation, that of {found.rewarded:,} rollouts is at most {format_number(normalised)}."
    )
    title = f"an advantage is ± {largest}, beyond what the rewards can make"
    return Finding("warning", seen, {"largest": found.most, "spread": spread}, title=title)


AGAINST_REWARDS = Check(
    "advantages_against_rewards",
    "advantages have the opposite sign of their rewards",
    "Each update makes the rewarded responses less likely.",
    "Look for a sign in the advantages, or in the loss, and for rewards that are costs.",
    _check_sign,
    explains=False,
)
OUTLIER = Check(
    "advantage_outlier",
    "an advantage is far larger than the rewards can make",
    "One rollout outweighs all others of its update.",
    "Look for a deviation near 0 in the normalisation, and for a value function that diverges; clip advantages.",
    _check_size,
    explains=False,
)
_OF_BATCH = "advantages are relative to the batch, not to their group"
_TO_BATCH = (
    "If they should be relative to the group (GRPO), subtract the mean of each group_id, and divide by its deviation. "
    "With a baseline of the batch (REINFORCE++) it is meant."
)
NOT_OF_GROUP = Check(
    "advantages_not_of_group",
    "rollouts of one group with equal rewards have different advantages",
    "If advantages are relative to the group, they compare rollouts of different prompts.",
    "Normalise by group_id and not by a fixed number of rows: a group that lost a rollout moves all later ones. "
    "Rewards that are shaped after they are logged do the same, on purpose.",
    _check,
    explains=False,
    auxiliary=True,
)
