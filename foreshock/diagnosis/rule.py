"""A threshold rule, as data: its thresholds, its side, its hysteresis, and the run's own baseline; and its events."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from typing import Literal

from foreshock.comparisons import STEP_ROW
from foreshock.diagnosis.statistics import MEDIAN_NOISE, Pooling, step_noise
from foreshock.severity import Severity

Change = Literal["fired", "cleared"]
Evidence = Mapping[str, float | int | str]


@dataclass(frozen=True, slots=True)
class Event:
    """A rule that fired at ``step``, or one that fired at ``fired_step`` and clears at ``step``.

    If ``moves_learning_rate``, the event alone lets the advice lower the learning rate; absolute crossings never do.
    """

    rule: str
    step: int
    value: float
    threshold: float
    severity: Severity
    why: str
    what_to_do: str
    moves_learning_rate: bool = False
    evidence: Evidence = field(default_factory=dict)
    change: Change = "fired"
    fired_step: int = -1

    def __post_init__(self) -> None:
        if self.change == "fired" and self.fired_step == -1:
            object.__setattr__(self, "fired_step", self.step)


BASELINE_VALUES = 10
"""The baseline is the median of the run's first ten values; a longer one would include an early rise."""

NOISE_Z = 3.0
"""A relative threshold is at least three standard deviations of the baseline's step-to-step noise: the healthy k3 of a
small batch can change tenfold between two steps. The median of several steps has less noise than one."""

LARGEST_SPREAD = 700.0

HYSTERESIS = 0.7
"""A rule clears within 0.7 × the way from the ideal value to its threshold, so that a value oscillating around the
threshold is one alert."""

INCOMPLETE_STEP = "incomplete_step"
CLIENT_LOSSES = "client_losses"
STALE_RUN = "stale_run"
JUDGING_FAILED = "judging_failed"
DELIVERY_RULES = (INCOMPLETE_STEP, CLIENT_LOSSES, STALE_RUN, JUDGING_FAILED)
"""The alerts on the delivery of rollouts, and on a run that the service cannot judge. They have no threshold, and
detection does not derive them."""

Direction = Literal["above", "below", "away"]
Effect = Literal["none", "hold", "halve"]
Cause = Literal["mismatch", "sampling", "policy", "gradient", "length", "staleness", "data"]


@dataclass(frozen=True, slots=True)
class ThresholdRule:
    """A rule that fires beyond ``absolute`` and beyond ``relative`` × the run's baseline (each optional).

    ``key`` is ``comparison:measure``; with ``key@baseline`` the baseline itself must be beyond the threshold too.
    ``reference`` is another quantity: its newest value replaces the baseline. ``direction`` is the side that is beyond;
    "away" is either side of ``ideal``, and thresholds are distances from it. ``ideal`` is the value of a perfect run,
    which hysteresis counts from. ``pooled`` rules judge all steps together, or the median of the newest five, instead
    of ``minimum_duration`` in a row.

    ``effect``: "halve" lets the control loop lower the learning rate while the rule fires, as if it were at twice its
    set point; "hold" freezes it while the rule fires. Only the length surge has the third effect, a schedule.
    """

    name: str
    key: str
    severity: Severity
    why: str
    what_to_do: str
    source: str
    cause: Cause = "mismatch"
    absolute: float | None = None
    relative: float | None = None
    reference: str | None = None
    direction: Direction = "above"
    ideal: float = 0.0
    pooled: Pooling | None = None
    minimum_duration: int = 5
    cooldown_steps: int = 20
    lag_zero_only: bool = False
    corroborates_surge: bool = False
    effect: Effect = "none"
    least_tokens: int = 0
    """Steps with fewer tokens than this are not judged and enter no baseline, if their number is known."""
    least_groups: int = 0
    """Steps with fewer prompt groups than this are not judged, or with an unknown number of them."""
    follows_learning: bool = False
    """While the reward rises, a value beyond the threshold counts as learning and enters the baseline."""

    def __post_init__(self) -> None:
        if self.absolute is None and self.relative is None:
            raise ValueError(f"rule {self.name} has no threshold; set absolute or relative")
        if self.effect != "none" and self.relative is None:
            raise ValueError(
                f"rule {self.name} has the effect {self.effect!r} and no relative threshold; set relative: an absolute "
                "crossing alone never moves the learning rate"
            )
        below = self.direction == "below"
        if self.relative is not None and not (0.0 < self.relative < 1.0 if below else 1.0 < self.relative < math.inf):
            side = "below 1 and above 0" if below else "above 1"
            raise ValueError(f"relative of rule {self.name} must be {side}, got {self.relative:g}")
        if self.reference is not None and self.relative is None:
            raise ValueError(f"rule {self.name} has a reference and no relative threshold; set relative")
        if self.pooled == "mean" and (self.direction == "below" or (self.absolute or 1.0) <= 0.0):
            raise ValueError(f"rule {self.name} pools means, which needs a threshold above 0 and not the side below")
        if self.minimum_duration < 1 or self.cooldown_steps < 0 or self.least_tokens < 0:
            raise ValueError(f"rule {self.name} needs minimum_duration >= 1, cooldown_steps >= 0 and least_tokens >= 0")

    @property
    def quantity(self) -> str:
        """The key without ``@baseline``."""
        return self.key.removesuffix("@baseline")

    @property
    def measure_name(self) -> str:
        """The quantity without its comparison."""
        return self.quantity.partition(":")[2]

    @property
    def keys(self) -> tuple[str, ...]:
        """The quantities that the rule reads."""
        others = (
            self.reference,
            self.tokens_key if self.least_tokens else None,
            self.groups_key if self.least_groups else None,
        )
        return (self.quantity, *(key for key in others if key is not None))

    @property
    def tokens_key(self) -> str:
        """The quantity with the number of tokens that the rule's quantity is a mean over."""
        comparison, _, measure = self.quantity.partition(":")
        if measure.startswith("low_probability"):
            return f"{comparison}:low_probability_tokens"
        return f"{comparison}:tokens" if "/" in comparison else f"{STEP_ROW}:num_tokens"

    @property
    def groups_key(self) -> str:
        """The quantity with the number of prompt groups of the rule's comparison."""
        return f"{self.quantity.partition(':')[0]}:prompt_groups"

    def has_enough(self, values: Mapping[str, float]) -> bool:
        """Return whether a step has the tokens and prompt groups that the rule needs.

        An unknown number of tokens is enough.
        """
        if self.least_groups and not values.get(self.groups_key, 0.0) >= self.least_groups:
            return False
        return not self.least_tokens or not values.get(self.tokens_key, math.inf) < self.least_tokens

    @property
    def baseline_name(self) -> str:
        """The name of the quantity whose baseline the rule uses; a distance from the ideal has its own name."""
        if self.reference is not None:
            return self.reference
        return f"|{self.quantity} - {self.ideal:g}|" if self.direction == "away" else self.quantity

    def measure(self, value: float) -> float:
        """Return what is compared with the threshold: the value, or its distance from the ideal."""
        return abs(value - self.ideal) if self.direction == "away" else value

    def threshold(self, baseline: Baseline | None) -> float | None:
        """Return the stricter of both thresholds; None while a relative rule has no baseline."""
        if self.relative is None:
            return self.absolute
        if baseline is None or not (baseline.ready or (self.reference is not None and baseline.logs)):
            return None
        noise = baseline.noise * (MEDIAN_NOISE if self.pooled == "median" else 1.0)
        # Beyond exp(±700) a threshold is 0 or infinite, and never crossed.
        spread = min(max(abs(math.log(self.relative)), NOISE_Z * noise), LARGEST_SPREAD)
        relative = baseline.level * math.exp(-spread if self.direction == "below" else spread)
        if self.absolute is None:
            return relative
        return min(self.absolute, relative) if self.direction == "below" else max(self.absolute, relative)

    def is_beyond(self, measured: float, threshold: float) -> bool:
        """Return True if what `measure` returned is beyond the threshold."""
        return measured < threshold if self.direction == "below" else measured > threshold

    def is_back(self, measured: float, threshold: float) -> bool:
        """Return True if what `measure` returned is back within the hysteresis band.

        The band ends between threshold and ideal, if the ideal is on the healthy side of the threshold.
        """
        below = self.direction == "below"
        ideal = 0.0 if self.direction == "away" else self.ideal
        if below and ideal == 0.0 < threshold:
            # For rules without an ideal. A measure that is at most 1 needs one: it cannot reach 0.9 / 0.7.
            return measured >= threshold / HYSTERESIS
        if ideal > threshold if below else ideal < threshold:
            end = ideal + HYSTERESIS * (threshold - ideal)
        else:
            end = threshold + (1.0 if below else -1.0) * (1.0 - HYSTERESIS) * abs(threshold)
        return measured >= end if below else measured <= end


@dataclass(frozen=True, slots=True)
class Baseline:
    """The first values of one quantity at one lag, as natural logs."""

    logs: tuple[float, ...] = ()

    @property
    def ready(self) -> bool:
        return len(self.logs) >= BASELINE_VALUES

    @property
    def level(self) -> float:
        return _level_and_noise(self.logs)[0]

    @property
    def noise(self) -> float:
        """Standard deviation of the step-to-step noise, in log units."""
        return _level_and_noise(self.logs)[1]

    def with_value(self, value: float) -> Baseline:
        """Add a value until the baseline is complete; values <= 0 have no logarithm and are ignored."""
        return self if self.ready or value <= 0.0 else Baseline((*self.logs, math.log(value)))

    def following(self, value: float) -> Baseline:
        """Return the baseline with the newest value instead of the oldest one."""
        return self if value <= 0.0 else Baseline((*self.logs[1:], math.log(value)))


@lru_cache(maxsize=256)
def _level_and_noise(logs: tuple[float, ...]) -> tuple[float, float]:
    # Cached: a complete baseline never changes, and every rule needs it at every step.
    return math.exp(median(logs)), step_noise(logs)
