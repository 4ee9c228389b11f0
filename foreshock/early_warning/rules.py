"""The threshold rules: published ranges and the run's own baseline, with hysteresis, minimum duration and cooldown.

A rule fires after its value has stood beyond the threshold for ``minimum_duration`` measured steps in a row, clears
after as many steps back within the hysteresis band, and then rests for ``cooldown_steps``. Steps without a value count
for neither. A rule without a relative part can never move the learning rate: absolute ranges differ by model, card and
precision (facts: a figure of one faulty system is another's healthy range).

Ranges are for dense bf16 models at lag 0; where rollouts lag behind the trainer, absolute comparison rules rest and
relative ones use the baseline of equal lag.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from foreshock.early_warning.events import Event
from foreshock.early_warning.robust import median, step_noise
from foreshock.json_values import finite_or_none
from foreshock.severity import Severity

BASELINE_VALUES = 10
"""The run's own baseline is the median of its first ten values: short, so that an early rise is not swallowed by it."""

NOISE_Z = 3.0
"""A relative rule also asks for three standard deviations of the baseline's own step-to-step noise: a healthy k3 of a
small batch jumps tenfold between neighbouring steps."""

HYSTERESIS = 0.7
"""A rule clears below 0.7 × its threshold, so that a value hovering at the threshold is one alert."""

LAG_KEY = "rollout:lag_mean"


@dataclass(frozen=True, slots=True)
class ThresholdRule:
    """Fires where the value lies beyond ``absolute`` and beyond ``relative`` × the run's own baseline (each optional).

    ``key`` is ``comparison:measure`` (``key@baseline``: the baseline itself); ``direction`` says which side is beyond.
    """

    name: str
    key: str
    severity: Severity
    why: str
    what_to_do: str
    source: str
    absolute: float | None = None
    relative: float | None = None
    direction: Literal["above", "below"] = "above"
    minimum_duration: int = 5
    cooldown_steps: int = 20
    lag_zero_only: bool = False
    corroborates_surge: bool = False
    moves_learning_rate: bool = False

    def __post_init__(self) -> None:
        if self.absolute is None and self.relative is None:
            raise ValueError(f"rule {self.name} has no threshold")
        if self.moves_learning_rate and self.relative is None:
            raise ValueError(f"rule {self.name}: an absolute crossing alone never moves the learning rate")

    def threshold(self, baseline: Baseline | None) -> float | None:
        """The stricter of both thresholds; None while a relative rule has no baseline."""
        if self.relative is None:
            return self.absolute
        if baseline is None or not baseline.ready:
            return None
        spread = max(abs(math.log(self.relative)), NOISE_Z * baseline.noise)
        relative = baseline.level * math.exp(spread if self.direction == "above" else -spread)
        if self.absolute is None:
            return relative
        return max(self.absolute, relative) if self.direction == "above" else min(self.absolute, relative)

    def is_beyond(self, value: float, threshold: float) -> bool:
        return value > threshold if self.direction == "above" else value < threshold

    def is_back(self, value: float, threshold: float) -> bool:
        """Whether the value is well within the threshold again."""
        return value <= threshold * HYSTERESIS if self.direction == "above" else value >= threshold / HYSTERESIS


@dataclass(frozen=True, slots=True)
class Baseline:
    """The first values of one quantity at one lag, as logs."""

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
        """Values that are not positive have no logarithm and say nothing about a level: they are left out."""
        return self if self.ready or value <= 0.0 else Baseline((*self.logs, math.log(value)))


@lru_cache(maxsize=256)
def _level_and_noise(logs: tuple[float, ...]) -> tuple[float, float]:
    # A full baseline never changes, and every rule asks for it at every step.
    return math.exp(median(logs)), step_noise(logs)


@dataclass(frozen=True, slots=True)
class RuleState:
    """How long a rule has stood beyond its threshold, or back within it, and whether it fires."""

    beyond: int = 0
    back: int = 0
    fired_step: int | None = None
    cleared_step: int | None = None

    def to_json(self) -> list[int | None]:
        return [self.beyond, self.back, self.fired_step, self.cleared_step]

    @classmethod
    def from_json(cls, value: list[Any]) -> RuleState:
        return cls(*value)


@dataclass(frozen=True, slots=True)
class RulesState:
    """All rules' states by name and all baselines by ``key@lag``."""

    rules: Mapping[str, RuleState]
    baselines: Mapping[str, Baseline]

    @classmethod
    def initial(cls) -> RulesState:
        return cls({}, {})

    def firing(self, rule: ThresholdRule) -> int | None:
        """The step at which ``rule`` fired, while it stands."""
        state = self.rules.get(rule.name)
        return None if state is None else state.fired_step

    def to_json(self) -> dict[str, Any]:
        return {
            "rules": {name: state.to_json() for name, state in sorted(self.rules.items())},
            "baselines": {name: list(baseline.logs) for name, baseline in sorted(self.baselines.items())},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RulesState:
        return cls(
            {name: RuleState.from_json(state) for name, state in value["rules"].items()},
            {name: Baseline(tuple(logs)) for name, logs in value["baselines"].items()},
        )


def advance_rules(
    state: RulesState, step: int, values: Mapping[str, float], rules: tuple[ThresholdRule, ...]
) -> tuple[RulesState, tuple[Event, ...]]:
    """The state after a closed step, and what fired or cleared at it. Values that are not finite count as missing."""
    lag_value = values.get(LAG_KEY, 0.0)
    lag = round(lag_value) if math.isfinite(lag_value) else 0
    states, baselines = dict(state.rules), dict(state.baselines)
    for key in sorted({rule.key.removesuffix("@baseline") for rule in rules}):
        value = values.get(key)
        if value is not None and math.isfinite(value):
            name = f"{key}@{lag}"
            baselines[name] = baselines.get(name, Baseline()).with_value(value)
    events: list[Event] = []
    for rule in rules:
        baseline = baselines.get(f"{rule.key.removesuffix('@baseline')}@{lag}")
        measured = _measured(rule, values, baseline, lag)
        threshold = rule.threshold(baseline)
        if measured is None or threshold is None:
            continue
        states[rule.name], event = _advance_rule(rule, states.get(rule.name, RuleState()), step, measured, threshold)
        if event is not None:
            events.append(replace(event, evidence=_evidence(rule, event, baseline, lag)))
    return RulesState(states, baselines), tuple(events)


def _measured(rule: ThresholdRule, values: Mapping[str, float], baseline: Baseline | None, lag: int) -> float | None:
    if rule.lag_zero_only and lag != 0:
        return None
    if rule.key.endswith("@baseline"):
        return baseline.level if baseline is not None and baseline.ready else None
    return finite_or_none(values.get(rule.key))


def _advance_rule(
    rule: ThresholdRule, state: RuleState, step: int, value: float, threshold: float
) -> tuple[RuleState, Event | None]:
    beyond = state.beyond + 1 if rule.is_beyond(value, threshold) else 0
    back = state.back + 1 if rule.is_back(value, threshold) else 0
    state = replace(state, beyond=beyond, back=back)
    if state.fired_step is None:
        resting = state.cleared_step is not None and step <= state.cleared_step + rule.cooldown_steps
        if beyond < rule.minimum_duration or resting:
            return state, None
        return replace(state, fired_step=step), _event(rule, step, value, threshold)
    if back < rule.minimum_duration:
        return state, None
    cleared = replace(_event(rule, step, value, threshold), change="cleared", fired_step=state.fired_step)
    return replace(state, fired_step=None, cleared_step=step), cleared


def _event(rule: ThresholdRule, step: int, value: float, threshold: float) -> Event:
    return Event(
        rule=rule.name,
        step=step,
        value=value,
        threshold=threshold,
        severity=rule.severity,
        why=rule.why,
        what_to_do=rule.what_to_do,
        moves_learning_rate=rule.moves_learning_rate,
    )


def _evidence(rule: ThresholdRule, event: Event, baseline: Baseline | None, lag: int) -> dict[str, float | int | str]:
    evidence: dict[str, float | int | str] = {
        "key": rule.key,
        "source": rule.source,
        "lag": lag,
        "measured_steps_in_a_row": rule.minimum_duration,
    }
    if rule.absolute is not None:
        evidence["absolute_threshold"] = rule.absolute
    if rule.relative is not None and baseline is not None and baseline.ready:
        evidence["baseline"] = baseline.level
        evidence["baseline_noise"] = baseline.noise
        evidence["times_baseline"] = event.value / baseline.level
    return evidence
