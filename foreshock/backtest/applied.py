"""What a recorded run would have lost in `apply` mode: the scales that its trainer would have got, and their Σ η."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreshock.diagnosis.detectors import (
    LEARNING_RATE_KEY,
    ClosedStep,
    WarningConfiguration,
    WarningState,
    advance,
    open_signals,
)
from foreshock.learning_rate.decisions import Decision, Observation, decide, fold


class AppliedAdvice:
    """The advice of a run in `apply` mode, step by step: each decision holds from the step after its cause."""

    def __init__(self, configuration: WarningConfiguration) -> None:
        self._configuration = configuration
        self._state, self._log, self._advice = WarningState(), list[Decision](), fold([])

    def scale(self, step: int) -> float:
        """Return the advised scale of a step, from the decisions so far."""
        return self._advice.scale(step)

    def observe(self, closed: ClosedStep) -> None:
        """Judge a closed step; steps come in ascending order."""
        self._state, _ = advance(self._state, closed, self._configuration)
        known = None if self._advice.schedule is None else self._advice.schedule.surge_step
        signals = open_signals(self._state, self._configuration)
        if self._state.surge_step == known and not signals:
            return
        surge = self._state.surge_step
        schedule = self._configuration.schedule_at(closed.step if surge is None else surge)
        seen = Observation(1, closed.step, closed.step, surge, signals, 0, schedule)
        made = decide(self._log, seen)
        if made:
            self._log.extend(made)
            self._advice = fold(self._log)


def scales_under_apply(steps: Sequence[ClosedStep], configuration: WarningConfiguration) -> list[float]:
    """Return the advised scale of each step if each decision holds from the step after the one that caused it."""
    advice, scales = AppliedAdvice(configuration), list[float]()
    for closed in steps:
        scales.append(advice.scale(closed.step))
        advice.observe(closed)
    return scales


def lost_learning_rate(steps: Sequence[ClosedStep], scales: Sequence[float]) -> float:
    """Return the share of Σ η that the scales take away; a step without a logged rate has the last one, or 1."""
    rate, total, kept, last = 1.0, 0.0, 0.0, None
    for closed, scale in zip(steps, scales, strict=True):
        logged = closed.values.get(LEARNING_RATE_KEY, math.nan)
        rate = logged if math.isfinite(logged) and logged >= 0.0 else rate
        passed = 1 if last is None else closed.step - last
        total, kept, last = total + passed * rate, kept + passed * rate * scale, closed.step
    return 1.0 - kept / total if total > 0.0 else 0.0
