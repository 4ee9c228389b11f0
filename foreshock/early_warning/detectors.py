"""All detectors as one pure step: ``advance(state, closed step, configuration) -> (state', events)``.

Steps go in ascending order; what arrives late is put in its place by replaying from a state before it. The state is
plain data whose JSON form round-trips bit for bit, so a replay from a snapshot equals a replay from the start.
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
from foreshock.early_warning.rules import LAG_KEY, RulesState, ThresholdRule, advance_rules
from foreshock.early_warning.schedule import LengthDecaySchedule
from foreshock.early_warning.surge import SurgeSettings, SurgeSign, SurgeState, advance_surge
from foreshock.severity import Severity

DETECTOR_VERSION = 1
"""Raised with every change of behaviour: snapshots of another version are not continued."""

LENGTH_KEY = "rollout:response_length_mean"


@dataclass(frozen=True, slots=True)
class WarningConfiguration:
    """What a run is watched with."""

    surge: SurgeSettings = field(default_factory=SurgeSettings)
    rules: tuple[ThresholdRule, ...] = field(default_factory=default_rules)

    @classmethod
    def for_model(cls, mixture_of_experts: bool) -> WarningConfiguration:
        return cls(rules=default_rules(mixture_of_experts))

    def digest(self) -> str:
        """Changes with the detectors' version and with every constant and rule."""
        return digest_of_json({"version": DETECTOR_VERSION, "configuration": asdict(self)})

    @property
    def keys(self) -> tuple[str, ...]:
        """The quantities that are looked at, as ``comparison:measure``."""
        return tuple(sorted({LENGTH_KEY, LAG_KEY} | {rule.key.removesuffix("@baseline") for rule in self.rules}))


@dataclass(frozen=True, slots=True)
class ClosedStep:
    """One closed step's numbers by ``comparison:measure``: ``rollout:response_length_mean`` (tokens),
    ``trainer/rollout:k3_kl`` (nats a token), ``scalars:grad_norm``. What was not measured is absent or NaN."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class WarningState:
    """Everything the detectors remember after ``step``; ``step`` is None before the first one."""

    step: int | None = None
    surge: SurgeState = field(default_factory=SurgeState)
    rules: RulesState = field(default_factory=RulesState.initial)

    @property
    def warming(self) -> bool:
        """True until there is a baseline of the response length."""
        return self.surge.warming

    @property
    def surge_step(self) -> int | None:
        """The surge that the schedule counts from, if there was one."""
        return self.surge.effective_surge_step

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "surge": self.surge.to_json(), "rules": self.rules.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> WarningState:
        return cls(value["step"], SurgeState.from_json(value["surge"]), RulesState.from_json(value["rules"]))

    def to_bytes(self) -> bytes:
        """Canonical JSON: equal states have equal bytes, and reading them back gives an equal state."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> WarningState:
        return cls.from_json(json.loads(data))


@dataclass(frozen=True, slots=True)
class OpenSignal:
    """A rule that stands at the newest step and moves the learning rate by itself."""

    rule: str
    fired_step: int


def advance(
    state: WarningState, closed_step: ClosedStep, configuration: WarningConfiguration
) -> tuple[WarningState, tuple[Event, ...]]:
    """The state after ``closed_step`` and what fired or cleared at it. Raises ValueError on a step out of order."""
    step = closed_step.step
    if state.step is not None and step <= state.step:
        raise ValueError(f"step {step} comes after step {state.step}: replay from a state before it")
    rules, events = advance_rules(state.rules, step, closed_step.values, configuration.rules)
    corroborated = any(rule.corroborates_surge and rules.firing(rule) is not None for rule in configuration.rules)
    surge, signs = advance_surge(
        state.surge, step, closed_step.values.get(LENGTH_KEY), corroborated, configuration.surge
    )
    return WarningState(step, surge, rules), events + tuple(_event_of(sign, configuration.surge) for sign in signs)


def open_signals(state: WarningState, configuration: WarningConfiguration) -> tuple[OpenSignal, ...]:
    """The rules that move the learning rate and stand now, oldest first."""
    standing = [
        OpenSignal(rule.name, fired)
        for rule in configuration.rules
        if rule.moves_learning_rate and (fired := state.rules.firing(rule)) is not None
    ]
    return tuple(sorted(standing, key=lambda signal: (signal.fired_step, signal.rule)))


_SEVERITY: dict[str, Severity] = {
    "surge": "critical",
    "early_surge": "warning",
    "surge_again": "warning",
    "ramp": "info",
}
_WHY = {
    "surge": "Responses have doubled within a window of steep growth: the length surge that comes before a collapse.",
    "early_surge": "Responses have doubled steeply within the first steps. Many healthy runs do so, and no mismatch or "
    "gradient signal stands beside it.",
    "surge_again": "Responses have doubled steeply once more.",
    "ramp": "Responses have doubled over a long time: a ramp, not a surge.",
}
_WHAT_TO_DO = {
    "surge": "Let the learning rate follow the length-decay schedule that counts from the first step of the surge.",
    "early_surge": "Nothing yet: the schedule follows by itself if the mismatch or the gradient norm rises too.",
    "surge_again": "The schedule goes on as it is. Look at the mismatch of the newest steps.",
    "ramp": "Nothing: a slow ramp has no effect on the learning rate. Check that the reward rises with it.",
}


def _event_of(sign: SurgeSign, settings: SurgeSettings) -> Event:
    evidence: dict[str, float | int | str] = {
        "surge_step": sign.surge_step,
        "baseline_length": sign.baseline,
        "growth": sign.length / sign.baseline,
        "noise": sign.noise,
        "window_steps": settings.window(sign.surge_step),
    }
    if sign.effective:
        evidence["decay_period"] = LengthDecaySchedule.from_surge(sign.surge_step).decay_period
    kind = "surge" if sign.effective else sign.kind
    name = {"early_surge": "length_surge_early", "surge_again": "length_surge_again", "ramp": "length_ramp"}
    return Event(
        rule=name.get(kind, "length_surge"),
        step=sign.step,
        value=sign.length,
        threshold=settings.growth * sign.baseline,
        severity=_SEVERITY[kind],
        why=_WHY[kind],
        what_to_do=_WHAT_TO_DO[kind],
        moves_learning_rate=sign.effective,
        evidence={key: value for key, value in evidence.items() if isinstance(value, str) or math.isfinite(value)},
    )
