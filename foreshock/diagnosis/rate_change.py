"""A logged learning rate that rose at once just before the reward fell."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from statistics import median
from typing import Final

from foreshock.api.diagnosis import DiagnosisCause
from foreshock.diagnosis.history import NEWEST_STEPS, PastAlert, SteppedValues
from foreshock.diagnosis.wording import number

RATE_ROSE: Final = "rate_rose"

_LEAST_TIMES: Final = 3.0
"""Least factor in one step, over the median of the rates before; a warm-up rises from a rate near 0."""
_LEAST_BEFORE: Final = 5


def rate_before_fall(rates: SteppedValues, fall: PastAlert, resumes: Collection[int]) -> tuple[DiagnosisCause, ...]:
    """Return the rate as a cause if it rose in the ten steps before an open fall of the reward, and stayed."""
    pairs = [each for each in zip(rates.steps, rates.values, strict=True) if each[1] > 0.0]
    for place, ((_, before), (step, now)) in enumerate(pairwise(pairs), start=1):
        earlier = [value for _, value in pairs[:place]]
        if now < _LEAST_TIMES * before or not fall.onset - NEWEST_STEPS <= step <= fall.onset + 1:
            continue
        if len(earlier) < _LEAST_BEFORE or min(value for _, value in pairs[place:]) < _LEAST_TIMES * median(earlier):
            continue
        where = f"at step {step}{', at the resume' if {step, step - 1} & set(resumes) else ''}"
        title = f"the learning rate rose × {number(now / before)} {where}"
        return (
            DiagnosisCause(
                name=RATE_ROSE,
                sentence=f"{title}, from {number(before)} to {number(now)}; the reward fell from step {fall.onset} on.",
                source="detector",
                title=title,
                explains=False,
                what_to_do=f"Set the rate back to {number(before)} and go on from a checkpoint from before step "
                f"{step}. Compare the schedule's state with that before: a resume may not restore it.",
                evidence={"step": step, "before": before, "now": now},
            ),
        )
    return ()
