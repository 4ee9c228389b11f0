"""All detectors as one pure function: ``advance(state, closed step, configuration) -> (state', events)``.

Steps are processed in ascending order; a late step is inserted by replaying from a state before it. The state is plain
data whose JSON form round-trips bit for bit, so a replay from a snapshot equals a replay from the start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from foreshock.digests import digest_of_json
from foreshock.early_warning.default_rules import default_rules
from foreshock.early_warning.events import Event
from foreshock.early_warning.rules import LAG_KEY, RulesState, ThresholdRule, advance_rules, forget_baselines
from foreshock.early_warning.schedule import LengthDecaySchedule
from foreshock.early_warning.surge import SurgeDetection, SurgeSettings, SurgeState, advance_surge, forget_lengths
from foreshock.model_kind import ModelKind
from foreshock.severity import Severity

DETECTOR_VERSION = 2
"""Increased with every change of behaviour: snapshots of another version are not used."""

LENGTH_KEY = "rollout:response_length_mean"


@dataclass(frozen=True, slots=True)
class WarningConfiguration:
    """The settings of all detectors of a run."""

    surge: SurgeSettings = field(default_factory=SurgeSettings)
    rules: tuple[ThresholdRule, ...] = field(default_factory=default_rules)

    @classmethod
    def for_model(cls, model_kind: ModelKind | None) -> WarningConfiguration:
        """Return the configuration for a kind of model; None: unknown."""
        return cls(rules=default_rules(model_kind))

    def digest(self) -> str:
        """Return a digest that changes with the detectors' version and with every constant and rule."""
        return digest_of_json({"version": DETECTOR_VERSION, "configuration": asdict(self)})

    @property
    def keys(self) -> tuple[str, ...]:
        """The quantities that the detectors read, as ``comparison:measure``."""
        return tuple(sorted({LENGTH_KEY, LAG_KEY} | {rule.key.removesuffix("@baseline") for rule in self.rules}))


@dataclass(frozen=True, slots=True)
class ClosedStep:
    """The values of one closed step by ``comparison:measure``: ``rollout:response_length_mean`` (tokens),
    ``trainer/rollout:k3_kl`` (nats per token), ``scalars:grad_norm``. Missing values are absent or NaN.

    ``rebaseline``: a change was announced at this step, so that earlier values are no baseline of it."""

    step: int
    values: Mapping[str, float]
    rebaseline: bool = False


@dataclass(frozen=True, slots=True)
class WarningState:
    """The state of all detectors after ``step``; ``step`` is None before the first step."""

    step: int | None = None
    surge: SurgeState = field(default_factory=SurgeState)
    rules: RulesState = field(default_factory=RulesState.initial)

    @property
    def warming(self) -> bool:
        """True until there is a baseline of the response length."""
        return self.surge.warming

    @property
    def surge_step(self) -> int | None:
        """The surge step that the schedule counts from, None without a surge."""
        return self.surge.effective_surge_step

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "surge": self.surge.to_json(), "rules": self.rules.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> WarningState:
        return cls(value["step"], SurgeState.from_json(value["surge"]), RulesState.from_json(value["rules"]))

    def to_bytes(self) -> bytes:
        """Return canonical JSON: equal states have equal bytes, and `from_bytes` gives an equal state."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> WarningState:
        return cls.from_json(json.loads(data))


@dataclass(frozen=True, slots=True)
class OpenSignal:
    """A rule that is firing at the newest step and moves the learning rate by itself."""

    rule: str
    fired_step: int


def advance(
    state: WarningState, closed_step: ClosedStep, configuration: WarningConfiguration
) -> tuple[WarningState, tuple[Event, ...]]:
    """Return the state after ``closed_step`` and the events at it. Raises ValueError if steps do not ascend."""
    step = closed_step.step
    if state.step is not None and step <= state.step:
        raise ValueError(f"steps must ascend, got {step} after {state.step}; replay from a state before step {step}")
    if closed_step.rebaseline:
        state = WarningState(state.step, forget_lengths(state.surge), forget_baselines(state.rules))
    rules, events = advance_rules(state.rules, step, closed_step.values, configuration.rules)
    corroborated = any(rule.corroborates_surge and rules.firing(rule) is not None for rule in configuration.rules)
    surge, detections = advance_surge(
        state.surge, step, closed_step.values.get(LENGTH_KEY), corroborated, configuration.surge
    )
    return WarningState(step, surge, rules), events + tuple(_event_of(each, configuration.surge) for each in detections)


def open_signals(state: WarningState, configuration: WarningConfiguration) -> tuple[OpenSignal, ...]:
    """Return the firing rules that move the learning rate, oldest first."""
    firing = [
        OpenSignal(rule.name, fired)
        for rule in configuration.rules
        if rule.moves_learning_rate and (fired := state.rules.firing(rule)) is not None
    ]
    return tuple(sorted(firing, key=lambda signal: (signal.fired_step, signal.rule)))


_SEVERITY: dict[str, Severity] = {
    "surge": "critical",
    "early_surge": "warning",
    "surge_again": "warning",
    "ramp": "info",
}
_WHY = {
    "surge": "The mean response length has doubled steeply: the length surge that precedes a collapse.",
    "early_surge": "The mean response length has doubled steeply within the first steps. Many healthy runs do so, "
    "and no mismatch or gradient rule is firing.",
    "surge_again": "The mean response length has doubled steeply once more.",
    "ramp": "The mean response length has doubled over many steps: a ramp, not a surge.",
}
_WHAT_TO_DO = {
    "surge": "Follow the length-decay schedule, which counts from the first step of the surge.",
    "early_surge": "Nothing yet: the schedule starts by itself if the mismatch or the gradient norm rises too.",
    "surge_again": "The schedule does not change. Check the mismatch of the newest steps.",
    "ramp": "Nothing: a slow ramp has no effect on the learning rate. Check that the reward rises with it.",
}


def _event_of(detection: SurgeDetection, settings: SurgeSettings) -> Event:
    evidence: dict[str, float | int | str] = {
        "surge_step": detection.surge_step,
        "baseline_length": detection.baseline,
        "growth": detection.length / detection.baseline,
        "noise": detection.noise,
        "window_steps": settings.window(detection.surge_step),
    }
    if detection.effective:
        evidence["decay_period"] = LengthDecaySchedule.from_surge(detection.surge_step).decay_period
    kind = "surge" if detection.effective else detection.kind
    name = {"early_surge": "length_surge_early", "surge_again": "length_surge_again", "ramp": "length_ramp"}
    return Event(
        rule=name.get(kind, "length_surge"),
        step=detection.step,
        value=detection.length,
        threshold=settings.growth * detection.baseline,
        severity=_SEVERITY[kind],
        why=_WHY[kind],
        what_to_do=_WHAT_TO_DO[kind],
        moves_learning_rate=detection.effective,
        evidence={key: value for key, value in evidence.items() if isinstance(value, str) or math.isfinite(value)},
    )
