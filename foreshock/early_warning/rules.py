"""The threshold rules: published ranges and the run's own baseline, with hysteresis, minimum duration and cooldown.

A rule fires after its value was beyond the threshold for ``minimum_duration`` measured steps in a row, clears after as
many steps back within the hysteresis band, and then cannot fire for ``cooldown_steps``. Steps without a value count for
neither. A rule without a relative threshold never moves the learning rate: absolute ranges differ by model, device and
precision.

Ranges are for dense bf16 models at lag 0. If rollouts lag behind the trainer, absolute rules of comparisons are not
evaluated, and relative rules use the baseline of equal lag.
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
"""The baseline is the median of the run's first ten values; a longer one would include an early rise."""

NOISE_Z = 3.0
"""A relative threshold is at least three standard deviations of the baseline's step-to-step noise: the healthy k3 of a
small batch can change tenfold between two steps."""

HYSTERESIS = 0.7
"""A rule clears below 0.7 × its threshold, so that a value oscillating around the threshold is one alert."""

LAG_KEY = "rollout:lag_mean"


@dataclass(frozen=True, slots=True)
class ThresholdRule:
    """A rule that fires beyond ``absolute`` and beyond ``relative`` × the run's baseline (each optional).

    ``key`` is ``comparison:measure`` (``key@baseline``: the baseline itself); ``direction`` is the side that is beyond.
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
            raise ValueError(f"rule {self.name} has no threshold; set absolute or relative")
        if self.moves_learning_rate and self.relative is None:
            raise ValueError(f"rule {self.name} moves the learning rate and has no relative threshold; set relative")

    def threshold(self, baseline: Baseline | None) -> float | None:
        """Return the stricter of both thresholds; None while a relative rule has no baseline."""
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
        """Return True if the value is beyond the threshold."""
        return value > threshold if self.direction == "above" else value < threshold

    def is_back(self, value: float, threshold: float) -> bool:
        """Return True if the value is back within the hysteresis band."""
        return value <= threshold * HYSTERESIS if self.direction == "above" else value >= threshold / HYSTERESIS


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


@lru_cache(maxsize=256)
def _level_and_noise(logs: tuple[float, ...]) -> tuple[float, float]:
    # Cached: a complete baseline never changes, and every rule needs it at every step.
    return math.exp(median(logs)), step_noise(logs)


@dataclass(frozen=True, slots=True)
class RuleState:
    """A rule's consecutive steps beyond its threshold or back within it, and when it fired and cleared."""

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
    """The states of all rules by name, and all baselines by ``key@lag``."""

    rules: Mapping[str, RuleState]
    baselines: Mapping[str, Baseline]

    @classmethod
    def initial(cls) -> RulesState:
        return cls({}, {})

    def firing(self, rule: ThresholdRule) -> int | None:
        """Return the step at which ``rule`` fired, None if it is not firing."""
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


def forget_baselines(state: RulesState) -> RulesState:
    """Return the state without baselines and counted steps. A firing rule stays so until its values are back."""
    return RulesState({name: replace(rule, beyond=0, back=0) for name, rule in state.rules.items()}, {})


def advance_rules(
    state: RulesState, step: int, values: Mapping[str, float], rules: tuple[ThresholdRule, ...]
) -> tuple[RulesState, tuple[Event, ...]]:
    """Return the state after a closed step and the events at it. NaN and ±inf count as missing values."""
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
        cooling_down = state.cleared_step is not None and step <= state.cleared_step + rule.cooldown_steps
        if beyond < rule.minimum_duration or cooling_down:
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
