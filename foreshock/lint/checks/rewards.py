"""Rewards without a spread: no group of rollouts teaches anything."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.lint.checks.duplicates import ALIKE
from foreshock.lint.checks.responses import OF_A_SAMPLE, Rollouts
from foreshock.lint.counting import Counting, Counts, Keys, Table, keys_of_groups
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome

if TYPE_CHECKING:
    from foreshock.measures.comparison import StepMeasurement

_LEAST_GROUPS, _LEAST_ROLLOUTS = 4, 8


class RewardsByGroup(Table):
    """Rollouts, those with a reward, the least reward negated and the largest by prompt group."""

    COLUMNS = ("rollouts", "rewards", "minus_min", "max")
    LARGEST = 2

    @classmethod
    def of_rollouts(cls, keys: Keys, reward: NDArray[np.floating[Any]] | None) -> Self:
        """Return the rewards by group of N rollouts with these group keys [N] and rewards [N], NaN for none."""
        rewards = np.full(keys.size, np.nan) if reward is None else reward
        known = np.isfinite(rewards)
        least, most = np.where(known, -rewards, -np.inf), np.where(known, rewards, -np.inf)
        return cls.of(keys, np.ones(keys.size), known, least, most)


@dataclass
class Signal(Counts):
    """Counts of advantages and rewards."""

    grouped_rollouts: int = 0  # with a group id
    advantages: int = 0
    advantages_not_zero: int = 0
    rewards: RewardsByGroup = field(default_factory=RewardsByGroup)

    def add_batch(self, counting: Counting) -> None:
        """Count the advantages and the rewards of a batch."""
        batch = counting.batch
        self.grouped_rollouts += sum(group is not None for group in batch.group_ids or ())
        if batch.advantage is not None:
            finite = batch.advantage[np.isfinite(batch.advantage)]
            self.advantages += finite.size
            self.advantages_not_zero += int(np.count_nonzero(finite))
        self.rewards += RewardsByGroup.of_rollouts(counting.group_keys, batch.reward)

    def across_steps(self) -> Self:
        """Return the counts without rewards, which are compared within a step only."""
        return replace(self, rewards=RewardsByGroup())

    def of_sample(self, measured: StepMeasurement) -> Self:
        """Return what the summaries of TRAINER_ROLLOUT know about all rollouts; the sample's counts without them."""
        pair = measured.comparisons.get(TRAINER_ROLLOUT)
        if pair is None:
            return self
        groups, advantage = pair.summaries.table.column("group_id").to_pylist(), pair.summaries.column("advantage")
        keys = keys_of_groups(groups, pair.summaries.table.column("sample_id").to_pylist())
        return type(self)(
            sum(group is not None for group in groups),
            int(np.isfinite(advantage).sum()),
            int((np.isfinite(advantage) & (advantage != 0)).sum()),
            RewardsByGroup.of_rollouts(keys, pair.summaries.column("reward")),
        )


def _check(judging: Judging) -> Outcome:
    """Check for groups in which all rewards are equal, and for groups of one rollout each."""
    signal, counts = judging[Signal], judging[Rollouts]
    rollouts, rewards, minus_min, largest = signal.rewards.values.T
    if not rewards.any() or not signal.grouped_rollouts:
        return NotChecked("needs reward and group_id")
    if signal.advantages_not_zero:
        return Clean("some advantages are not 0")
    several = rewards >= 2
    groups, total = int(several.sum()), int(rewards.sum())
    with_spread = int((largest[several] > -minus_min[several]).sum())
    if not with_spread and rollouts.sum() < counts.rollouts + counts.unseen:
        return NotChecked(OF_A_SAMPLE)
    zero = f"; all {signal.advantages:,} advantages are 0" if signal.advantages else ""
    if not groups and signal.grouped_rollouts >= _LEAST_ROLLOUTS and (rollouts <= 1).all():
        if not zero:
            # PPO and REINFORCE++ learn from one rollout of each prompt.
            why = "each rollout is a group of its own: log advantages, which need not be relative to the group"
            return NotChecked(why)
        seen = f"Each of {total:,} rollouts is a group of its own{zero}: there is no gradient."
        return Finding("info", seen, {"rollouts": total, "groups": rollouts.size})
    if groups < _LEAST_GROUPS:
        return NotChecked(f"needs {_LEAST_GROUPS} groups with two rewards, and there are {groups}")
    if with_spread:
        return Clean()
    repeated = judging.outcome("duplicated_rollouts")
    if isinstance(repeated, Finding) and repeated.title == ALIKE:
        return NotChecked(f"{ALIKE}, and so are their rewards")
    least, most = float(-minus_min.max()), float(largest.max())
    all_equal = f"all {total:,} rewards are {most:g}" if least == most else "within each group all rewards are equal"
    seen = (
        f"None of {groups:,} groups has a spread of rewards ({all_equal}){zero}: the gradient of an advantage relative "
        "to the group is 0."
    )
    solved = _SOLVED if least == most > 0 else ""
    return Finding("info", seen, {"groups": groups, "rewards": total, "least": least, "largest": most}, remedy=solved)


_SOLVED = "If the prompts are solved, take harder ones; if they are not, check the reward function."
NO_SPREAD = Check(
    "no_reward_spread",
    "no group has a spread of rewards",
    "Advantages relative to the group are 0: the step teaches nothing. The mismatch is measured as usual.",
    "Check the reward function and the group ids; filter prompts that are always or never solved.",
    _check,
    explains=False,
)
