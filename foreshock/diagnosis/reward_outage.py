"""Single steps whose reward is 0 between steps that are rewarded as before: the reward function failed there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from foreshock.api.diagnosis import DiagnosisCause
from foreshock.diagnosis.history import SteppedValues
from foreshock.diagnosis.statistics import step_noise
from foreshock.diagnosis.wording import reward_number

REWARD_OUTAGE: Final = "reward_outage"

_LEAST_REWARDED: Final = 20
_LEAST_SINCE: Final = 3
_LEAST_OF_MEDIAN: Final = 0.3
_LEAST_DEVIATIONS: Final = 4.0
"""Each other reward is at least this part of their median, and that is so many standard deviations of their
step-to-step noise: then a 0 is no reward that is small by chance."""
_MOST_GROUPS: Final = 3
_MOST_SHARE: Final = 0.25


def outage_of(reward: SteppedValues) -> tuple[DiagnosisCause, ...]:
    """Return the steps with a reward of exactly 0 as a cause, if all others are clearly above it; they are over."""
    pairs = list(zip(reward.steps, reward.values, strict=True))
    others = sorted(value for _, value in pairs if value != 0.0)
    groups = [[step for step, _ in group] for is_zero, group in groupby(pairs, lambda each: each[1] == 0.0) if is_zero]
    if not groups or len(groups) > _MOST_GROUPS or len(others) < max(_LEAST_REWARDED, (1 - _MOST_SHARE) * len(pairs)):
        return ()
    usual = others[len(others) // 2]
    noise = step_noise([value for _, value in pairs if value != 0.0])
    since = sum(step > groups[-1][-1] for step, _ in pairs)
    is_clear = usual > _LEAST_DEVIATIONS * noise and others[0] >= _LEAST_OF_MEDIAN * usual
    if not is_clear or since < _LEAST_SINCE or groups[0][0] == pairs[0][0]:
        return ()
    where = " and ".join(map(_words, groups))
    title = f"the reward was 0 {where}, and as before since"
    return (
        DiagnosisCause(
            name=REWARD_OUTAGE,
            sentence=f"{title}: it is {reward_number(others[0])} or more in the other {len(others)} steps.",
            source="detector",
            title=title,
            explains=False,
            what_to_do=f"Look at the reward function {where}: a judge or a sandbox that fails must not count as a "
            "reward of 0. Leave such rollouts out of the update.",
            evidence={"first_step": groups[0][0], "steps": sum(map(len, groups))},
        ),
    )


def _words(steps: Sequence[int]) -> str:
    return f"at step {steps[0]}" if len(steps) == 1 else f"in steps {steps[0]} to {steps[-1]}"
