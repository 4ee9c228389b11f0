"""Input check of the detectors: values that their arithmetic cannot handle, and a k3 that the logged |d| exclude, are
reported and reach no detector.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.mismatch_rules import K3
from foreshock.diagnosis.quantities import (
    LARGEST_D_KEY,
    LEARNING_RATE_KEY,
    LENGTH_KEY,
    LONGEST_KEY,
    MEAN_D_KEY,
    SCALARS,
    TRUNCATED_KEY,
)
from foreshock.diagnosis.rule import Event
from foreshock.diagnosis.wording import number

RULE: Final = "value_refused"

LARGEST: Final = 1e30
"""A larger magnitude is a mistake or an overflow: squares and ratios of smaller values are finite."""

SMALLEST: Final = 1e-100
"""A smaller magnitude counts as 0."""

CLEAN_STEPS: Final = 5
"""Steps without such a value after which the alert clears."""

CHECK_K3: Final = (
    "Check how the trainer computes each of them: of which tokens (mask, padding), and of which two policies. Log both "
    "log-probs of some rollouts, from which k3 is measured."
)

_MARGIN, _ROUNDING = 10.0, 1e-6
"""A k3 must be so many times its largest possible value, and so far above: some trainers log the mean of the largest
|d| of several batches, or round."""

_MEASURED: Final = f"{TRAINER_ROLLOUT}:min_d"

_NEVER_NEGATIVE: Final = frozenset({LENGTH_KEY, LONGEST_KEY, TRUNCATED_KEY, LEARNING_RATE_KEY})


@dataclass(frozen=True, slots=True)
class RefusedValues:
    """The step at which the open alert fired, and the number of steps since the last refused value."""

    fired_step: int | None = None
    clean: int = 0


def largest_k3(values: Mapping[str, float]) -> float:
    """Return the largest mean k3 of tokens with the logged mean and largest |d|; ∞ if the largest is not known.

    e^|d| − 1 − |d| grows faster than |d|: no token has more than the largest |d| gives, nor more than this for its |d|.
    """
    largest = values.get(LARGEST_D_KEY, math.inf)
    if not 0.0 <= largest < 700.0:
        return math.inf
    of_largest = math.expm1(largest) - largest
    mean = values.get(MEAN_D_KEY, math.inf)
    return min(of_largest, mean / largest * of_largest) if 0.0 <= mean <= largest and largest > 0.0 else of_largest


def contradiction(values: Mapping[str, float]) -> str:
    """Return what a logged k3 contradicts, as a clause; "" if it may be that of tokens with the logged |d|.

    A measured k3 is of the same tokens as the measured |d|; a trainer does not report the least d.
    """
    k3, most = values.get(K3, 0.0), largest_k3(values)
    if _MEASURED in values or not k3 > _MARGIN * most + _ROUNDING:
        return ""
    named = {"mean": MEAN_D_KEY, "largest": LARGEST_D_KEY}
    known = {name: number(values[key]) for name, key in named.items() if key in values}
    return (
        f"contradicts the logged {' and '.join(known)} |d|, {' and '.join(known.values())}, with which k3 is at most "
        f"{number(most)}"
    )


def refuse_values(
    state: RefusedValues, step: int, values: Mapping[str, float]
) -> tuple[RefusedValues, dict[str, float], tuple[Event, ...]]:
    """Return the state after ``step``, the values that detectors may read, and the events.

    Infinite values, magnitudes beyond `LARGEST`, negative lengths, fractions and learning rates, and a k3 that the
    logged |d| exclude raise an alert. NaN is a missing value, unless a trainer logged it as a scalar.
    """
    kept = {
        key: value if abs(value) >= SMALLEST else 0.0
        for key, value in values.items()
        # False for NaN too.
        if abs(value) <= LARGEST and not (value < 0.0 and key in _NEVER_NEGATIVE)
    }
    excluded = contradiction(kept)
    if excluded:
        del kept[K3]
    refused = (key for key in sorted(values) if key not in kept)
    named = next((key for key in refused if not math.isnan(values[key]) or key.startswith(f"{SCALARS}:")), None)
    if named is None:
        if state.fired_step is None:
            return state, kept, ()
        if state.clean + 1 < CLEAN_STEPS:
            return RefusedValues(state.fired_step, state.clean + 1), kept, ()
        return RefusedValues(), kept, (_event(step, "", "", "", state.fired_step),)
    if state.fired_step is not None:
        return RefusedValues(state.fired_step), kept, ()
    why = f"The value of {named} at step {step} is {values[named]:g}. It is stored, and no rule reads it."
    if excluded and named == K3:
        why = f"The logged k3, {number(values[K3])} at step {step}, {excluded}. It is stored, and no rule reads it."
    return RefusedValues(step), kept, (_event(step, named, f"{values[named]:g}", why, None),)


def _event(step: int, key: str, value: str, why: str, fired_step: int | None) -> Event:
    return Event(
        rule=RULE,
        step=step,
        value=0.0,
        threshold=LARGEST,
        severity="warning",
        why="No value is refused any more." if fired_step is not None else why,
        what_to_do=CHECK_K3
        if key == K3
        else "Find what the trainer logs there: infinite values, magnitudes beyond 1e30 and negative lengths are "
        "mistakes of the log or an overflow.",
        evidence={"key": key, "logged": value, "cause": "data", "source": "values that no detector can use"},
        change="fired" if fired_step is None else "cleared",
        fired_step=step if fired_step is None else fired_step,
    )
