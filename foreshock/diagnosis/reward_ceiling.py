"""Rewards that all become the highest one in one step: a reward function that passes everything."""

from __future__ import annotations

from statistics import median
from typing import Final

from foreshock.api.diagnosis import DiagnosisCause
from foreshock.diagnosis.history import SteppedValues
from foreshock.diagnosis.wording import reward_number

REWARD_CEILING: Final = "reward_ceiling"

_LEAST_STEPS: Final = 5
_LEAST_RISE: Final = 0.25
"""Least distance of each of the steps before from the highest reward, as a part of the run's range: a policy that
learns its task comes near it first."""


def ceiling_of(reward: SteppedValues) -> tuple[DiagnosisCause, ...]:
    """Return the constant highest reward as a cause if the mean has been exactly that in each step since a rise."""
    values = list(reward.values)
    since = len(values)
    while since and values[since - 1] == values[-1]:
        since -= 1
    before = values[max(since - _LEAST_STEPS, 0) : since]
    if len(before) < _LEAST_STEPS or len(values) - since < _LEAST_STEPS:
        return ()
    top, span = values[-1], values[-1] - min(values)
    if top - max(before) < _LEAST_RISE * span or span <= 0.0:
        return ()
    step, was = reward.steps[since], reward_number(median(before))
    title = f"every reward is {reward_number(top)} since step {step}, {was} on average before"
    return (
        DiagnosisCause(
            name=REWARD_CEILING,
            sentence=f"{title}: the mean reward is exactly {reward_number(top)} in all {len(values) - since} steps "
            "since. No policy learns so much in one step, and equal rewards teach nothing.",
            source="detector",
            title=title,
            explains=False,
            what_to_do=f"Look at the reward function at step {step}: a verifier, a judge or a sandbox that passes "
            "everything. Leave these rollouts out of the update.",
            evidence={"first_step": step, "before": median(before), "now": top},
        ),
    )
