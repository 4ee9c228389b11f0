"""Group ids that are not those of the prompts: groups of several prompts, or a group of its own for each rollout.

A framework that reorders a batch after it has assigned ids, or assigns them by position, compares rewards of different
prompts. Only prompts with several rollouts count. Turns that are rollouts of their own have other prompts in one group,
but share few of them with other groups; a prompt that is drawn twice is in two groups, each of one prompt.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.checks.duplicates import Repeats
from foreshock.lint.checks.responses import OF_A_SAMPLE, Rollouts
from foreshock.lint.checks.rewards import Signal
from foreshock.lint.counting import Keys
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome, format_number

_LEAST_GROUPS, _LEAST_ROLLOUTS, _MIXED_SHARE = 4, 8, 0.5
# Rollouts of one prompt are drawn in equal numbers; the same question about many images is not.
_EQUAL_SHARE = 0.9


def _check(judging: Judging) -> Outcome:
    """Check that the rollouts of a group have one prompt, and those of a prompt a group."""
    hashes, counts = judging[Repeats].hashes, judging[Rollouts]
    rollouts = len(hashes.keys)
    if not rollouts:
        return NotChecked("checked within a step, not across steps" if counts.rollouts else "needs rollouts")
    if judging[Signal].grouped_rollouts < counts.rollouts:
        return NotChecked("needs group_id")
    if counts.unseen:
        return NotChecked(OF_A_SAMPLE)
    pairs, of_pair = np.unique(np.stack([hashes.prompts, hashes.groups], axis=1), axis=0, return_counts=True)
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


GROUPS = Check(
    "groups_not_prompts",
    "the rollouts of a prompt have no common group id",
    "An advantage relative to the group compares answers to different questions, or has no baseline; intervals count "
    "rollouts of one prompt as independent.",
    "Give all rollouts of a prompt one group_id, and reorder ids and rewards with the rollouts.",
    _check,
    explains=False,
)
