"""Advantages that are not those of the groups: normalised with the rollouts of other prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np

from foreshock.lint.counting import Counting, Counts, Table
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome

_LEAST_SETS, _SHARE = 4, 0.1
# Rounding of float32 aside, equal rewards give equal advantages.
_TOLERANCE = 1e-3


class EqualRewards(Table):
    """Rollouts, and the least advantage negated and the largest, by prompt group and reward."""

    COLUMNS = ("rollouts", "minus_min", "max")
    LARGEST = 2


@dataclass
class Advantages(Counts):
    """The advantages of a group's rollouts with equal rewards."""

    sets: EqualRewards = field(default_factory=EqualRewards)

    def add_batch(self, counting: Counting) -> None:
        """Count the advantages of a batch; those per token need not be relative to a group."""
        batch = counting.batch
        if batch.advantage is None or batch.advantage_per_token or batch.reward is None or batch.group_ids is None:
            return
        rows = np.flatnonzero(np.isfinite(batch.advantage) & np.isfinite(batch.reward))
        bits = np.ascontiguousarray(batch.reward[rows], np.float32).view(np.uint32).astype(np.uint64)
        advantage = batch.advantage[rows]
        keys = counting.group_keys[rows] ^ (bits << np.uint64(32))
        self.sets += EqualRewards.of(keys, np.ones(rows.size), -advantage, advantage)

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
        return Clean()
    seen = (
        f"In {differ:,} of {spread.size:,} sets of rollouts with one group and one reward the advantages differ, by up "
        f"to {spread.max():.2g}."
    )
    return Finding("info", seen, {"sets": spread.size, "differ": differ})


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
