"""A k3 that grows over a few steps and falls back, again and again: the engine gets new weights at some steps only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np

from foreshock.api.diagnosis import DiagnosisCause
from foreshock.diagnosis.wording import number

SYNC_PERIOD: Final = "weights_every_few_steps"

_PERIODS: Final = range(3, 21)
_LEAST_PERIODS: Final = 3
_LEAST_TIMES: Final = 3.0
"""Least factor between the lowest and the highest step of a period."""
_EXPLAINED: Final = 0.8
"""Least part of the variance of log k3 that the place in the period explains; of noise at most about a third."""
_MIDDLE: Final = 0.25
"""The middle of a period is at least this part of the way up, in logarithms: a single bad step is no growth."""
_RISES: Final = 0.8
"""Least rank correlation of the level with the place in the period."""


def sync_period(steps: Sequence[int], k3: Sequence[float], healthy_end: float) -> DiagnosisCause | None:
    """Return a period of growth as a cause; None if there is none or k3 is healthy throughout."""
    found = _period_of(tuple(steps), tuple(k3)) if len(steps) >= 9 and max(k3) > healthy_end else None
    if found is None:
        return None
    period, first, low, high = found
    syncs = [step for step in steps if (step - first) % period == 0]
    where = ", ".join(map(str, syncs[-3:]))
    title = f"a weight sync every {period} steps only, between which k3 grows"
    return DiagnosisCause(
        name=SYNC_PERIOD,
        sentence=f"k3 grows over {period} steps, from {number(low)} to {number(high)}, and falls back, again and again "
        f"(lowest at the steps {where}): it looks as if new weights reached the engine every {period} steps only.",
        source="detector",
        title=title,
        certainty="possible",
        what_to_do="Sync the weights after each update, or correct for the staleness; log the versions "
        "(`trainer_weights_version`) so that it is measured as lag.",
        evidence={"period": period, "low": low, "high": high},
    )


# Cached: it is asked for several times in one diagnosis.
@lru_cache(maxsize=256)
def _period_of(steps: tuple[int, ...], k3: tuple[float, ...]) -> tuple[int, int, float, float] | None:
    """Return the period, a step at which it begins, and the median k3 of its first and last step."""
    values = np.asarray(k3, np.float64)
    if not (np.isfinite(values).all() and values.min() > 0.0) or values.max() < _LEAST_TIMES * values.min():
        return None
    logs, at = np.log(values), np.asarray(steps)
    whole = float(np.square(logs - logs.mean()).sum())
    for period in _PERIODS:
        phases = at % period
        if at.size < _LEAST_PERIODS * period or np.unique(phases).size < period:
            continue
        levels = np.array([np.median(logs[phases == phase]) for phase in range(period)])
        if 1.0 - float(np.square(logs - levels[phases]).sum()) / whole < _EXPLAINED:
            continue
        begins = int(np.argmin(levels))
        rising = np.roll(levels, -begins)
        height = float(rising[-1] - rising[0])
        order = np.corrcoef(np.arange(period), np.argsort(np.argsort(rising)))[0, 1]
        is_steady = rising[period // 2] - rising[0] >= _MIDDLE * height
        if height < math.log(_LEAST_TIMES) or order < _RISES or not is_steady:
            return None
        return period, begins, math.exp(float(rising[0])), math.exp(float(rising[-1]))
    return None
