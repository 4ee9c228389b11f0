"""What each arm does to the rate and to the weights of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

from benchmarks.closed_loop.bed import KEPT_EVERY, PROMPTS, RATIO_CAP, RESPONSES, Correction, Measured, Setting
from foreshock.backtest.replay import AppliedAdvice
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration
from foreshock.diagnosis.lags import AT_LAG_ZERO, K3_KEYS, LAG_KEY, LAGS, TOKENS_KEYS
from foreshock.diagnosis.mismatch_rules import K3
from foreshock.diagnosis.quantities import (
    ENTROPY_KEY,
    GRADIENT_NORM_KEY,
    LAST_STEP_KEY,
    LEARNING_RATE_KEY,
    LENGTH_KEY,
    REWARD_KEY,
    TOKENS_KEY,
    UPDATE_KEY,
)
from foreshock.learning_rate import levers
from foreshock.learning_rate.length_decay import Point, Schedule, ScheduleSettings
from foreshock.learning_rate.remedy import Situation, decide_remedy

Rate = Literal["constant", "cosine", "lengths", "advice", "least", "given"]
"""`lengths` is the length-decay schedule; `least` is the smaller one of advice and cosine; `given` are the scales of
another run."""
SHADOW_ENDS: Final = 40
SURGE_START: Final = 5
CONFIGURATION: Final = WarningConfiguration.for_model("dense")


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    rate: Rate = "constant"
    correction: Correction | Literal["advised"] | None = None
    logs_lags: bool = True
    logs_updates: bool = True
    """Whether `update_k3` is logged."""
    applies_from: int = 1
    """The first step with what is advised; before it the advice is in shadow mode."""
    rolls_back: bool = False
    """Whether a fall of the reward brings back the best checkpoint, after which the correction is on."""


REMEDY: Final = Arm("remedy", "advice", "advised")
"""What the service decides: the loop on the rate, and token TIS from the step on at which something follows it."""
ARMS: Final = (
    Arm("constant"),
    Arm("cosine", "cosine"),
    Arm("token-tis", "constant", "token_tis"),
    Arm("sequence-mis", "constant", "sequence_mis"),
    Arm("cosine-tis", "cosine", "token_tis"),
    Arm("cosine-mis", "cosine", "sequence_mis"),
    Arm("length-decay", "lengths"),
    Arm("rollback-mis", "constant", "sequence_mis", rolls_back=True),
    Arm("advice", "advice"),
    Arm("advice-tis", "advice", "token_tis"),
    REMEDY,
    Arm("advice-mis", "advice", "sequence_mis"),
    Arm("least-tis", "least", "token_tis"),
    Arm("blind", "advice", logs_lags=False, logs_updates=False),
    Arm("blind-tis", "advice", "token_tis", logs_lags=False, logs_updates=False),
    Arm("from-40-tis", "advice", "token_tis", applies_from=SHADOW_ENDS),
    Arm("remedy-40", "advice", "advised", applies_from=SHADOW_ENDS),
    Arm("remedy-no-lags", "advice", "advised", logs_lags=False),
    Arm("remedy-blind", "advice", "advised", logs_lags=False, logs_updates=False),
)

SHAM: Final = Arm("sham", "given", "token_tis")
"""The scales of the remedy of another seed."""
WITHOUT_FORESIGHT: Final = tuple(each for each in ARMS if each.rate in ("constant", "cosine", "lengths"))


def cosine(step: int, steps: int) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * (step - 1) / steps))


def length_decay(tokens: Sequence[int], step: int) -> float:
    """Return the scale of a step: the schedule of the first step whose responses are twice as long as at the start."""
    start = median(tokens[:SURGE_START]) if len(tokens) > SURGE_START else math.inf
    surge = next((place + 1 for place, each in enumerate(tokens) if each >= 2 * start), None)
    if surge is None:
        return 1.0
    schedule = Schedule.from_surge(surge, ScheduleSettings(minimum_period=1))
    point = Point(boundary=schedule.boundary(surge + 1), period=schedule.decay_period)
    return point.scale(step, schedule.factor, schedule.floor)


class Rollback:
    """A rule without foresight: a moving average of the reward that has lost a quarter brings back a checkpoint.

    It is the one with the best average, which the weights before a step have earned; once in `APART` steps.
    """

    WEIGHT, LOST, APART, FIRST = 0.2, 0.25, 15, 10

    def __init__(self) -> None:
        self._average: float | None = None
        self._best, self._since = 0.0, 0
        self._checkpoint = (0.0, 1)
        self.is_corrected = False

    def target(self, step: int, reward: float) -> int | None:
        """Return the step of the checkpoint to go back to after a step; None: go on."""
        before = reward if self._average is None else self._average
        self._average = before + self.WEIGHT * (reward - before)
        if step <= self.FIRST:
            return None
        self._best = max(self._best, self._average)
        if step % KEPT_EVERY == 1:
            self._checkpoint = max(self._checkpoint, (self._average, step))
        if self._average >= (1.0 - self.LOST) * self._best or step < self._since:
            return None
        self.is_corrected, self._since, self._average = True, step + self.APART, self._checkpoint[0] or self._average
        return self._checkpoint[1]


class Recorded:
    """A controller that keeps what its run did. ``scales`` are those of `given`."""

    def __init__(self, arm: Arm, setting: Setting, scales: Sequence[float] = ()) -> None:
        self._advised: levers.Correction | None = None
        self._arm, self._setting, self._given = arm, setting, scales
        starts = arm.applies_from == 1
        self._advice = AppliedAdvice(CONFIGURATION, starts=starts) if arm.rate in ("advice", "least") else None
        self._rollback = Rollback() if arm.rolls_back else None
        self.goes_back_to: int | None = None
        self.scales: list[float] = []
        self.measured: list[Measured] = []

    @property
    def correction(self) -> Correction | None:
        if self._rollback is not None and not self._rollback.is_corrected:
            return None
        if self._arm.correction != "advised":
            return self._arm.correction
        if self._advised is None or len(self.measured) + 1 < self._arm.applies_from:
            return None
        assert self._advised == levers.Correction("token_tis", f"{RATIO_CAP:g}")
        return "token_tis"

    def scale(self, step: int) -> float:
        self.scales.append(self._scale(step))
        return self.scales[-1]

    def _scale(self, step: int) -> float:
        if self._arm.rate == "given":
            return self._given[step - 1]
        if self._arm.rate == "lengths":
            return length_decay([each.tokens for each in self.measured], step)
        of_plan = cosine(step, self._setting.steps) if self._arm.rate in ("cosine", "least") else 1.0
        if self._advice is None or step < self._arm.applies_from:
            return of_plan
        return min(self._advice.scale(step), of_plan)

    def observe(self, measured: Measured) -> None:
        self.measured.append(measured)
        if self._rollback is not None:
            self.goes_back_to = self._rollback.target(measured.step, measured.reward)
        if self._advice is not None:
            self._advice.observe(ClosedStep(measured.step, self._logged(measured)))
            known = Situation(self._advice.loop, CONFIGURATION.loop, correction=self._advised)
            self._advised = decide_remedy(known).correction

    def _logged(self, measured: Measured) -> Mapping[str, float]:
        """Return what the hooks of trainers log of a step."""
        tokens = measured.tokens
        values = {
            K3: measured.k3,
            TOKENS_KEY: float(tokens),
            REWARD_KEY: measured.reward,
            LENGTH_KEY: tokens / (PROMPTS * RESPONSES),
            ENTROPY_KEY: measured.entropy,
            GRADIENT_NORM_KEY: measured.gradient_norm,
            LEARNING_RATE_KEY: self._setting.rate * self.scales[-1],
            LAST_STEP_KEY: float(self._setting.steps),
        }
        if self._arm.logs_updates:
            values[UPDATE_KEY] = measured.update_k3
        if not self._arm.logs_lags:
            return values
        values[LAG_KEY] = measured.lag
        values |= dict.fromkeys(TOKENS_KEYS.values(), 0.0)
        if measured.k3_at_lag_0 is not None:
            values[TOKENS_KEYS[AT_LAG_ZERO]] = float(measured.tokens_at_lag_0)
            values[K3_KEYS[AT_LAG_ZERO]] = measured.k3_at_lag_0
        if measured.tokens_at_lag_0 < tokens:
            values[TOKENS_KEYS[LAGS[-1]]] = float(tokens - measured.tokens_at_lag_0)
        return values
