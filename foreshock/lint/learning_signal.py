"""Whether the batch can teach anything: spread of rewards, empty and truncated responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foreshock.lint.counting import EvidenceBuilder
from foreshock.lint.report import Clean, Finding, NotChecked, Outcome, format_percent
from foreshock.measures.statistics.derived_columns import truncated_rollouts
from foreshock.rollouts.batch import RolloutBatch

if TYPE_CHECKING:
    from foreshock.lint.evidence import LintEvidence

_LEAST_GROUPS, _LEAST_ROLLOUTS = 4, 8
_EMPTY_SHARE, _LEAST_EMPTY = 0.03, 3
_TRUNCATED_SHARE = 0.99


def count_learning_signal(batch: RolloutBatch, builder: EvidenceBuilder) -> None:
    """Count empty and truncated responses, rollouts with a group, and advantages other than 0."""
    truncated, known = truncated_rollouts(batch)
    groups = batch.group_ids or ()
    builder.count(
        empty_rollouts=int((batch.response_lengths == 0).sum()),
        finish_known=int(known.sum()),
        truncated_rollouts=int(truncated.sum()),
        grouped_rollouts=sum(group is not None for group in groups),
    )
    if batch.advantage is not None:
        finite = batch.advantage[np.isfinite(batch.advantage)]
        builder.count(advantages=finite.size, advantages_not_zero=int(np.count_nonzero(finite)))


def check_reward_spread(evidence: LintEvidence) -> Outcome:
    """Check for groups in which all rewards are equal, and for groups of one rollout each."""
    check = "no_reward_spread"
    rollouts, rewards, minus_min, largest = evidence.groups.rewards.T
    if not rewards.any() or not evidence.count("grouped_rollouts"):
        return NotChecked(check, "needs reward and group_id")
    if evidence.count("advantages_not_zero"):
        return Clean(check, "some advantages are not 0")
    several = rewards >= 2
    groups, total = int(several.sum()), int(rewards.sum())
    zero = f"; all {evidence.count('advantages'):,} advantages are 0" if evidence.count("advantages") else ""
    if not groups and evidence.count("grouped_rollouts") >= _LEAST_ROLLOUTS and (rollouts <= 1).all():
        seen = (
            f"Each of {total:,} rollouts is a group of its own{zero}: an advantage relative to the group is 0, and so "
            "is the gradient."
        )
        return Finding(check, "info", seen, {"rollouts": total, "groups": rollouts.size})
    with_spread = int((largest[several] > -minus_min[several]).sum())
    if groups < _LEAST_GROUPS:
        return NotChecked(check, f"needs {_LEAST_GROUPS} groups with two rewards, and there are {groups}")
    if with_spread:
        return Clean(check)
    least, most = float(-minus_min.max()), float(largest.max())
    all_equal = f"all {total:,} rewards are {most:g}" if least == most else "within each group all rewards are equal"
    seen = (
        f"None of {groups:,} groups has a spread of rewards ({all_equal}){zero}: the gradient of an advantage relative "
        "to the group is 0."
    )
    return Finding(check, "info", seen, {"groups": groups, "rewards": total, "least": least, "largest": most})


def check_responses(evidence: LintEvidence) -> tuple[Outcome, Outcome]:
    """Check for many empty responses, and for a batch in which every response was cut off."""
    empty, truncated = "empty_responses", "all_truncated"
    rollouts, count = evidence.count("rollouts"), evidence.count("empty_rollouts")
    found: list[Outcome] = [Clean(empty), Clean(truncated)]
    if count >= max(_LEAST_EMPTY, _EMPTY_SHARE * rollouts):
        seen = f"{count:,} of {rollouts:,} responses ({format_percent(count, rollouts)}) have no token."
        found[0] = Finding(empty, "critical" if count == rollouts else "warning", seen, {"empty": count})
    known, cut = evidence.count("finish_known"), evidence.count("truncated_rollouts")
    if not known:
        found[1] = NotChecked(truncated, "needs finish_reason or length_cap")
    elif known >= _LEAST_ROLLOUTS and cut >= _TRUNCATED_SHARE * known:
        seen = f"{cut:,} of {known:,} responses ({format_percent(cut, known)}) were cut off at a length limit."
        found[1] = Finding(truncated, "warning", seen, {"truncated": cut, "rollouts": known})
    return found[0], found[1]
