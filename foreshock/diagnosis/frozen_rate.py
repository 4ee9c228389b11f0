"""A learning rate of 0 for many steps: nothing is learned any more."""

from __future__ import annotations

from typing import Final

from foreshock.api.diagnosis import DiagnosisCause
from foreshock.diagnosis.history import NEWEST_STEPS, SteppedValues
from foreshock.diagnosis.wording import number

RATE_IS_ZERO: Final = "rate_is_zero"


def zero_rate(rates: SteppedValues) -> tuple[DiagnosisCause, ...]:
    """Return the rate as a cause if it has been exactly 0 for at least ten steps, and was above 0 before.

    A run whose rate is 0 from the start is a measurement on purpose, and the last step of a schedule may have 0.
    """
    pairs = list(zip(rates.steps, rates.values, strict=True))
    above = [place for place, (_, value) in enumerate(pairs) if value > 0.0]
    if not above or len(pairs) - 1 - above[-1] < NEWEST_STEPS:
        return ()
    since, before = pairs[above[-1] + 1][0], pairs[above[-1]][1]
    count = len(pairs) - 1 - above[-1]
    title = f"the learning rate is 0 since step {since}"
    return (
        DiagnosisCause(
            name=RATE_IS_ZERO,
            sentence=f"{title}, for {count} steps; it was {number(before)} before. No update changes the policy.",
            source="detector",
            title=title,
            explains=False,
            what_to_do="Look at the schedule of the learning rate: its number of steps may be smaller than the run's.",
            evidence={"steps": count, "before": before},
        ),
    )
