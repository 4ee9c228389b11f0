"""What the policy learns from: rewards without a spread, groups that are not those of the prompts, wrong advantages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.lint.checks.duplicates import ALIKE, Repeats
from foreshock.lint.checks.responses import OF_A_SAMPLE, Rollouts
from foreshock.lint.counting import Counting, Counts, Keys, Table, keys_of_groups, largest
from foreshock.lint.evidence import LintEvidence
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome, format_number
from foreshock.measures.estimators.intervals import student_t_quantile
from foreshock.measures.statistics.clusters import keys_of_texts

if TYPE_CHECKING:
    from foreshock.measures.comparison import StepMeasurement

_LEAST_GROUPS, _LEAST_ROLLOUTS = 4, 8
# Most groups have rollouts of several prompts.
_MIXED_SHARE = 0.5
# Rollouts of one prompt are drawn in equal numbers; the same question about many images is not.
_EQUAL_SHARE = 0.9
# One end of the 95 % interval of the share of a data source's prompts that are rewarded.
_TAIL = 0.025
_CODES = 1 << 32
_LEAST_SETS, _SHARE = 4, 0.1
# Rounding of float32 aside, equal rewards give equal advantages.
_TOLERANCE = 1e-3
# A correlation of advantage and reward below this, in this share of the groups.
_AGAINST, _NEARLY_ALL = -0.5, 0.9
# Rewards that are shaped after they are logged leave more than this mean correlation.
_FOLLOWS = 0.6
# A mean advantage beyond this part of their root mean square is not 0.
_BESIDE_ZERO = 0.05
# Generalised advantage estimation with a discount may add some rewards up.
_TIMES_THE_BOUND = 10.0


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
        return cls.of(keys, 1.0, known, least, most)


@dataclass
class Signal(Counts, within_step=True):
    """Counts of advantages and rewards."""

    grouped_rollouts: int = 0  # with a group id
    advantages: int = 0
    advantages_not_zero: int = 0
    rewards: RewardsByGroup = field(default_factory=RewardsByGroup)

    def add_batch(self, counting: Counting) -> None:
        batch = counting.batch
        self.add(grouped_rollouts=sum(group is not None for group in batch.group_ids or ()))
        if batch.advantage is not None:
            finite = batch.advantage[np.isfinite(batch.advantage)]
            self.add(advantages=finite.size, advantages_not_zero=finite != 0)
        self.rewards += RewardsByGroup.of_rollouts(counting.group_keys, batch.reward)

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


class RewardsBySource(Table):
    """Rewards and their sum, the code of the source, the least one negated and the largest, by source and group."""

    COLUMNS = ("rewards", "total", "source", "minus_min", "max")
    LARGEST = 3


@dataclass
class Sources(Counts, within_step=True):
    """The rewards of each data source."""

    rewards: RewardsBySource = field(default_factory=RewardsBySource)

    def add_batch(self, counting: Counting) -> None:
        """Count the rewards of a batch; the names of the sources are kept as examples, under their codes."""
        batch = counting.batch
        if batch.data_sources is None or batch.reward is None:
            return
        rows = np.flatnonzero(np.isfinite(batch.reward))
        names = [batch.data_sources[row] or "" for row in rows.tolist()]
        codes = keys_of_texts(names) % _CODES
        for name, code in sorted(set(zip(names, codes.tolist(), strict=True))):
            counting.add_example(f"rewards {code}", name)
        reward = batch.reward[rows]
        keys = counting.group_keys[rows] ^ (codes * np.uint64(_CODES))
        self.rewards += RewardsBySource.of(keys, 1.0, reward, codes, -reward, reward)


class EqualRewards(Table):
    """Rollouts, and the least advantage negated and the largest, by prompt group and reward."""

    COLUMNS = ("rollouts", "minus_min", "max")
    LARGEST = 2


class SumsByGroup(Table):
    """Sums of the rewards r and the advantages A of a prompt group's rollouts."""

    COLUMNS = ("rollouts", "r", "rr", "a", "aa", "ra")


@dataclass
class Advantages(Counts, within_step=True):
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
        self.add(rewarded=rewards.size, most=float(np.abs(known).max(initial=-np.inf)))
        self.add(minus_least_reward=-float(rewards.min(initial=np.inf)))
        self.add(largest_reward=float(rewards.max(initial=-np.inf)))
        if batch.advantage_per_token or batch.group_ids is None:
            return
        rows = np.flatnonzero(np.isfinite(batch.advantage) & np.isfinite(batch.reward))
        bits = np.ascontiguousarray(batch.reward[rows], np.float32).view(np.uint32).astype(np.uint64)
        advantage = batch.advantage[rows]
        keys = counting.group_keys[rows] ^ (bits << np.uint64(32))
        self.sets += EqualRewards.of(keys, 1.0, -advantage, advantage)
        r, wide = batch.reward[rows].astype(np.float64), advantage.astype(np.float64)
        self.groups += SumsByGroup.of(counting.group_keys[rows], 1.0, r, r * r, wide, wide * wide, r * wide)


def _check_spread(judging: Judging) -> Outcome:
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


def _check_groups(judging: Judging) -> Outcome:
    """Check that the rollouts of a group have one prompt, and those of a prompt a group.

    Only prompts with several rollouts count. Turns that are rollouts of their own have other prompts in one group, but
    share few of them with other groups; a prompt that is drawn twice is in two groups, each of one prompt.
    """
    hashes, counts = judging[Repeats].hashes, judging[Rollouts]
    rollouts = len(hashes.keys)
    if not rollouts:
        return NotChecked("checked within a step, not across steps" if counts.rollouts else "needs rollouts")
    if judging[Signal].grouped_rollouts < counts.rollouts:
        return NotChecked("needs group_id")
    if counts.unseen:
        return NotChecked(OF_A_SAMPLE)
    pairs, of_pair = np.unique(np.stack([hashes.prompts, hashes.keys[:, 3]], axis=1), axis=0, return_counts=True)
    prompts, of_prompt = _counted(pairs[:, 0])
    groups, of_group = _counted(pairs[:, 1])
    is_shared = prompts[of_prompt] > 1
    shared = np.bincount(of_group, is_shared)
    several = np.bincount(of_group, of_pair) > 1
    mixed, total = int((several & (shared > 1)).sum()), int(several.sum())
    if total >= _LEAST_GROUPS and mixed >= _MIXED_SHARE * total:
        seen = (
            f"{mixed:,} of {total:,} groups have rollouts of several prompts, "
            f"{format_number(float(shared[shared > 1].mean()))} on average, whose other rollouts are in other groups."
        )
        title = "groups have rollouts of several prompts"
        return Finding("warning", seen, {"mixed": mixed, "groups": total}, title=title)
    drawn = np.bincount(of_prompt, of_pair)
    typical = int(np.median(drawn))
    apart = rollouts >= _LEAST_ROLLOUTS and groups.size == rollouts and drawn.size >= _LEAST_GROUPS
    if apart and typical > 1 and (drawn == typical).sum() >= _EQUAL_SHARE * drawn.size:
        seen = f"{drawn.size:,} prompts have {typical} rollouts each, and each rollout has a group_id of its own."
        return Finding("info", seen, {"prompts": drawn.size, "groups": groups.size})
    return Clean()


def _counted(keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the number of occurrences of each different key, [K], and the place there of each key, [N]."""
    _, places, counts = np.unique(keys, return_inverse=True, return_counts=True)
    return counts, places


def _check_sources(judging: Judging) -> Outcome:
    """Check for data sources without a reward above the lowest one, of which others have many."""
    count, _, source, minus_min, largest = judging[Sources].rewards.values.T
    codes, of_source = np.unique(source, return_inverse=True)
    if codes.size < 2:
        return Clean("fewer than two data sources have rewards")
    if judging[Rollouts].unseen:
        return NotChecked(OF_A_SAMPLE)
    lowest = -float(minus_min.max())
    rewards, groups = np.bincount(of_source, count), np.bincount(of_source)
    rewarded = np.bincount(of_source, largest > lowest)
    # The end of the exact 95 % interval of the share of rewarded prompts, if none of them is rewarded.
    most = 1.0 - _TAIL ** (1.0 / groups)
    rest = np.maximum(groups.sum() - groups, 1)
    share = (rewarded.sum() - rewarded) / rest
    least = share - 2.0 * np.sqrt(share * (1.0 - share) / rest)
    without = (rewarded == 0) & (groups >= _LEAST_GROUPS) & (most < least)
    if not without.any():
        return Clean()
    place = int(np.argmax(np.where(without, groups, -1)))
    name = _name_of_source(judging.evidence, codes[place])
    seen = (
        f"All {int(rewards[place]):,} rewards of data source {name} are {lowest:g}, the lowest: of its prompts at most "
        f"{100.0 * most[place]:.0f} % are rewarded (95 % range), of the others' {100.0 * share[place]:.0f} %."
    )
    return Finding(
        "info",
        seen,
        {"groups": groups[place], "most": most[place], "share_of_others": share[place]},
        title=f"no rollout of data source {name} is rewarded",
    )


def _name_of_source(evidence: LintEvidence, code: float) -> str:
    return next((each.sample_id for each in evidence.where(f"rewards {int(code)}")), "")


def rewards_by_source(evidence: LintEvidence) -> dict[str, tuple[int, float]]:
    """Return the number and the sum of the rewards of each data source; empty with fewer than two sources."""
    count, total, source, _, _ = evidence[Sources].rewards.values.T
    found = {}
    for code in np.unique(source):
        of_code = source == code
        found[_name_of_source(evidence, code)] = int(count[of_code].sum()), float(total[of_code].sum())
    return found if len(found) > 1 else {}


def _check_equal(judging: Judging) -> Outcome:
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
    """Check for advantages that fall with the reward within nearly all groups, or that hardly depend on it."""
    count, r, rr, a, aa, ra = judging[Advantages].groups.values.T
    with np.errstate(all="ignore"):
        correlation = (ra - r * a / count) / np.sqrt((rr - r * r / count) * (aa - a * a / count))
    correlation = correlation[np.isfinite(correlation) & (count > 1)]
    if correlation.size < _LEAST_SETS:
        return NotChecked("needs reward, group_id and an advantage for each rollout, and groups with a spread")
    against = int((correlation < _AGAINST).sum())
    if against < _NEARLY_ALL * correlation.size:
        mean, error = correlation.mean(), correlation.std(ddof=1) / math.sqrt(correlation.size)
        most = float(mean + error * student_t_quantile(1.0 - _TAIL, correlation.size - 1))
        if most > _FOLLOWS:
            return Clean()
        seen = (
            f"Within {correlation.size:,} groups the correlation of advantage and reward is {format_number(mean)} on "
            f"average, at most {format_number(most)} (95 % range, Student's t). Advantages of these rewards give 1."
        )
        numbers = {"groups": correlation.size, "correlation": float(mean), "most": most}
        return Finding("warning", seen, numbers, title=_NOT_OF_REWARDS, remedy=_TO_ROWS)
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


NO_SPREAD = Check(
    "no_reward_spread",
    "no group has a spread of rewards",
    "Advantages relative to the group are 0: the step teaches nothing. The mismatch is measured as usual.",
    "Check the reward function and the group ids; filter prompts that are always or never solved.",
    _check_spread,
    explains=False,
)
GROUPS = Check(
    "groups_not_prompts",
    "the rollouts of a prompt have no common group id",
    "An advantage relative to the group compares answers to different questions, or has no baseline; intervals count "
    "rollouts of one prompt as independent.",
    "Give all rollouts of a prompt one group_id, and reorder ids and rewards with the rollouts.",
    _check_groups,
    explains=False,
)
UNREWARDED = Check(
    "source_not_rewarded",
    "no rollout of a data source is rewarded",
    "These prompts teach nothing, and the mean reward hides it.",
    "Look at some responses of this data source and at its reward function: a name or a format that it does not know, "
    "or prompts that are too hard.",
    _check_sources,
    explains=False,
    lasting=True,
)
AGAINST_REWARDS = Check(
    "advantages_against_rewards",
    "advantages have the opposite sign of their rewards",
    "Each update makes the rewarded responses less likely.",
    "Look for a sign in the advantages, or in the loss, and for rewards that are costs.",
    _check_sign,
    explains=False,
)
_NOT_OF_REWARDS = "advantages do not follow the rewards of their rollouts"
_TO_ROWS = (
    "Compare the order of rollouts, rewards and advantages: rows that are repeated, sorted or gathered on the way to "
    "the loss give a rollout the advantage of another one."
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
    _check_equal,
    explains=False,
)
