"""A data source whose rollouts are never rewarded, while those of others are: a reward function that does not fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np

from foreshock.lint.checks.responses import OF_A_SAMPLE, Rollouts
from foreshock.lint.counting import Counting, Counts, Example, Table
from foreshock.lint.evidence import LintEvidence
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome
from foreshock.measures.statistics.clusters import keys_of_texts

_LEAST_GROUPS, _TAIL = 4, 0.025
_CODES = 1 << 32


class RewardsBySource(Table):
    """Rewards and their sum, the code of the source, the least one negated and the largest, by source and group."""

    COLUMNS = ("rewards", "total", "source", "minus_min", "max")
    LARGEST = 3


@dataclass
class Sources(Counts):
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
            counting.add_example(f"rewards {code}", Example(name))
        reward = batch.reward[rows]
        keys = counting.group_keys[rows] ^ (codes * np.uint64(_CODES))
        self.rewards += RewardsBySource.of(keys, np.ones(rows.size), reward, codes, -reward, reward)

    def across_steps(self) -> Self:
        """Return the counts without rewards, which are compared within a step only."""
        return type(self)()


def _check(judging: Judging) -> Outcome:
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
    name = next(iter(judging.evidence.where(f"rewards {int(codes[place])}")), Example("")).sample_id
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


def rewards_by_source(evidence: LintEvidence) -> dict[str, tuple[int, float]]:
    """Return the number and the sum of the rewards of each data source; empty with fewer than two sources."""
    table = evidence[Sources].rewards
    found = {}
    for code in np.unique(table.column("source")):
        rows = table.values[table.column("source") == code]
        named = next(iter(evidence.where(f"rewards {int(code)}")), Example(""))
        found[named.sample_id] = (int(rows[:, 0].sum()), float(rows[:, 1].sum()))
    return found if len(found) > 1 else {}


UNREWARDED = Check(
    "source_not_rewarded",
    "no rollout of a data source is rewarded",
    "These prompts teach nothing, and the mean reward hides it.",
    "Look at some responses of this data source and at its reward function: a name or a format that it does not know, "
    "or prompts that are too hard.",
    _check,
    explains=False,
    lasting=True,
)
