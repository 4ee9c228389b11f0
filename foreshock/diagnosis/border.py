"""Input check of the detectors: values that their arithmetic cannot handle are reported and reach no detector."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from foreshock.diagnosis.quantities import LEARNING_RATE_KEY, LENGTH_KEY, LONGEST_KEY, SCALARS, TRUNCATED_KEY
from foreshock.diagnosis.rule import Event

RULE: Final = "value_refused"

LARGEST: Final = 1e30
"""A larger magnitude is a mistake or an overflow: squares and ratios of smaller values are finite."""

SMALLEST: Final = 1e-100
"""A smaller magnitude counts as 0."""

CLEAN_STEPS: Final = 5
"""Steps without such a value after which the alert clears."""

_NEVER_NEGATIVE: Final = frozenset({LENGTH_KEY, LONGEST_KEY, TRUNCATED_KEY, LEARNING_RATE_KEY})


@dataclass(frozen=True, slots=True)
class RefusedValues:
    """The step at which the open alert fired, and the number of steps since the last refused value."""

    fired_step: int | None = None
    clean: int = 0


def refuse_values(
    state: RefusedValues, step: int, values: Mapping[str, float]
) -> tuple[RefusedValues, dict[str, float], tuple[Event, ...]]:
    """Return the state after ``step``, the values that detectors may read, and the events.

    Infinite values, magnitudes beyond `LARGEST` and negative lengths, fractions and learning rates raise an alert. NaN
    is a missing value, unless a trainer logged it as a scalar.
    """
    kept = {
        key: value if abs(value) >= SMALLEST else 0.0
        for key, value in values.items()
        # False for NaN too.
        if abs(value) <= LARGEST and not (value < 0.0 and key in _NEVER_NEGATIVE)
    }
    refused = (key for key in sorted(values) if key not in kept)
    named = next((key for key in refused if not math.isnan(values[key]) or key.startswith(f"{SCALARS}:")), None)
    if named is None:
        if state.fired_step is None:
            return state, kept, ()
        if state.clean + 1 < CLEAN_STEPS:
            return RefusedValues(state.fired_step, state.clean + 1), kept, ()
        return RefusedValues(), kept, (_event(step, "", "", state.fired_step),)
    if state.fired_step is not None:
        return RefusedValues(state.fired_step), kept, ()
    return RefusedValues(step), kept, (_event(step, named, f"{values[named]:g}", None),)


def _event(step: int, key: str, value: str, fired_step: int | None) -> Event:
    why = f"The value of {key} at step {step} is {value}. It is stored, and no rule reads it."
    return Event(
        rule=RULE,
        step=step,
        value=0.0,
        threshold=LARGEST,
        severity="warning",
        why="No value is refused any more." if fired_step is not None else why,
        what_to_do="Find what the trainer logs there: infinite values, magnitudes beyond 1e30 and negative lengths are "
        "mistakes of the log or an overflow.",
        evidence={"key": key, "logged": value, "cause": "data", "source": "values that no detector can use"},
        change="fired" if fired_step is None else "cleared",
        fired_step=step if fired_step is None else fired_step,
    )
