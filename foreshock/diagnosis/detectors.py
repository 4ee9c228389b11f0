"""All detectors as one pure function: ``advance(state, closed step, configuration) -> (state', events)``.

Steps are processed in ascending order; a late step is inserted by replaying from a state before it. The state is plain
data whose JSON form round-trips bit for bit, so a replay from a snapshot equals a replay from the start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

from foreshock.diagnosis.border import RefusedValues, refuse_values
from foreshock.diagnosis.default_rules import default_rules
from foreshock.diagnosis.lags import LAG_KEY, LAG_KEYS, StepLags
from foreshock.diagnosis.largest_token import LARGEST_TOKEN_KEYS, without_largest_token
from foreshock.diagnosis.mismatch_rules import K3, K3_PER_ENTROPY
from foreshock.diagnosis.quantities import (
    LARGEST_D_KEY,
    LAST_STEP_KEY,
    LEARNING_RATE_KEY,
    LENGTH_KEY,
    LONGEST_KEY,
    MEAN_D_KEY,
    REWARD_KEY,
    TOKENS_KEY,
    TRUNCATED_KEY,
    UPDATE_KEY,
)
from foreshock.diagnosis.reward import FALL_RULE, RewardSettings, RewardState, advance_reward, is_rising
from foreshock.diagnosis.rule import Event, ThresholdRule
from foreshock.diagnosis.rule_files import NO_CHANGES, RuleChanges
from foreshock.diagnosis.rules import RulesState, advance_rules, forget_baselines
from foreshock.diagnosis.surge import advance_surge
from foreshock.diagnosis.surge_state import (
    StepLengths,
    SurgeSettings,
    SurgeState,
    Watching,
    event_of,
    forget_lengths,
    is_armed,
    watching,
)
from foreshock.digests import digest_of_json
from foreshock.healthy_ranges import required_range
from foreshock.json_values import finite_or_none
from foreshock.learning_rate.control_loop import (
    DEFAULT_LOOP,
    DRIVEN_SET_POINTS,
    LoopSettings,
    LoopState,
    Reading,
    advance_loop,
)
from foreshock.learning_rate.length_decay import ScheduleSettings
from foreshock.model_kind import ModelKind

DETECTOR_VERSION = 22
"""Increased with every change of behaviour: snapshots of another version are not used."""


RATE_UNIT_BITS = 120
"""Σ η is kept in units of 2⁻¹²⁰: sums of integers do not depend on how the steps between two values are grouped."""

LARGEST_RATE = 1e6
"""A larger learning rate is a logging mistake and counts as this."""

_OWN_KEYS = frozenset({
    LENGTH_KEY, LONGEST_KEY, TRUNCATED_KEY, REWARD_KEY, LEARNING_RATE_KEY, *LAG_KEYS, K3, K3_PER_ENTROPY, UPDATE_KEY,
    LAST_STEP_KEY, TOKENS_KEY, MEAN_D_KEY, LARGEST_D_KEY, *LARGEST_TOKEN_KEYS,
})  # fmt: skip
"""The quantities that the detectors read in addition to those of the rules."""

WATCHING_REASONS: Mapping[Watching, str] = {
    "warming": "There are too few steps for a baseline yet.",
    "no_lengths": "No response lengths are reported, so no length surge can be seen. Log response_length/mean, "
    "or upload rollouts.",
    "at_cap": "The responses are as long as their cap, so their mean length cannot show a surge: that detector is "
    "disarmed. The rules go on.",
    "watching": "No reason to lower the rate.",
    "growing_with_reward": "Watching: lengths grow with reward. The learning rate is not lowered.",
    "surged": "The response lengths have surged.",
}


@dataclass(frozen=True, slots=True)
class WarningConfiguration:
    """The settings of all detectors of a run."""

    surge: SurgeSettings = field(default_factory=SurgeSettings)
    rules: tuple[ThresholdRule, ...] = field(default_factory=default_rules)
    reward: RewardSettings = field(default_factory=RewardSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)

    @classmethod
    def for_model(cls, model_kind: ModelKind | None, changes: RuleChanges = NO_CHANGES) -> WarningConfiguration:
        """Return the configuration for a kind of model (None: unknown), with the changes of a file of rules.

        The loop's set points were tuned on dense models. For another kind, those that the file leaves at their default
        are scaled by the ratio of its k3 range to that of dense models.
        """
        ranges = [required_range("k3_kl", kind).warning or 1.0 for kind in (model_kind, None)]
        scaled = {
            name: getattr(DEFAULT_LOOP, name) * ranges[0] / ranges[1]
            for name in DRIVEN_SET_POINTS
            if getattr(changes.loop, name) == getattr(DEFAULT_LOOP, name)
        }
        return cls(
            rules=changes.applied_to(default_rules(model_kind)),
            reward=RewardSettings.for_model(model_kind),
            schedule=changes.schedule,
            loop=replace(changes.loop, **scaled),
        )

    def digest(self) -> str:
        """Return a digest that changes with the detectors' version and with every constant and rule."""
        return digest_of_json({"version": DETECTOR_VERSION, "configuration": asdict(self)})

    @property
    def keys(self) -> tuple[str, ...]:
        """The quantities that the detectors read, as ``comparison:measure``."""
        return tuple(sorted(_OWN_KEYS | {key for rule in self.rules for key in rule.keys}))


@dataclass(frozen=True, slots=True)
class ClosedStep:
    """The values of one closed step by ``comparison:measure``: ``rollout:response_length_mean`` (tokens),
    ``trainer/rollout:k3_kl`` (nats per token), ``scalars:grad_norm``. Missing values are absent or NaN.

    ``rebaseline``: a change was announced at this step, so baselines start again. ``faulty``: the lint has a critical
    finding, so that k3 compares something else than the two policies: no learning rate follows it."""

    step: int
    values: Mapping[str, float]
    rebaseline: bool = False
    faulty: bool = False


@dataclass(frozen=True, slots=True)
class WarningState:
    """The state of all detectors after ``step``; ``step`` is None before the first step."""

    step: int | None = None
    surge: SurgeState = field(default_factory=SurgeState)
    rules: RulesState = field(default_factory=RulesState)
    reward: RewardState = field(default_factory=RewardState)
    loop: LoopState = field(default_factory=LoopState)
    rate_units: int | None = None
    refused: RefusedValues = field(default_factory=RefusedValues)
    stopped_step: int | None = None
    """The step at which a detector raised: from there on nothing is detected."""

    @property
    def learning_rate_sum(self) -> float | None:
        """Σ η up to ``step``, a second clock beside the steps; None before the first learning rate."""
        return None if self.rate_units is None else self.rate_units / 2**RATE_UNIT_BITS

    def watching(self, settings: SurgeSettings) -> Watching:
        """Return what the detector of the length surge is doing."""
        return watching(self.surge, settings)

    def armed(self, settings: SurgeSettings) -> bool:
        """Return whether a length surge could be detected at the next step."""
        return is_armed(self.surge, settings)

    @property
    def surge_step(self) -> int | None:
        """The surge step that the schedule counts from, None without a surge."""
        return self.surge.effective_surge_step

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "surge": self.surge.to_json(),
            "rules": self.rules.to_json(),
            "reward": self.reward.to_json(),
            "loop": asdict(self.loop),
            "rate_units": self.rate_units,
            "refused": asdict(self.refused),
            "stopped_step": self.stopped_step,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> WarningState:
        return cls(
            value["step"],
            SurgeState.from_json(value["surge"]),
            RulesState.from_json(value["rules"]),
            RewardState.from_json(value["reward"]),
            LoopState.from_json(value["loop"]),
            value["rate_units"],
            RefusedValues(**value["refused"]),
            value["stopped_step"],
        )

    def to_bytes(self) -> bytes:
        """Return canonical JSON: equal states have equal bytes, and `from_bytes` gives an equal state."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> WarningState:
        return cls.from_json(json.loads(data))


@dataclass(frozen=True, slots=True)
class OpenSignal:
    """A rule that is firing at the newest step and holds the learning rate."""

    rule: str
    fired_step: int


def advance(
    state: WarningState, closed_step: ClosedStep, configuration: WarningConfiguration
) -> tuple[WarningState, tuple[Event, ...]]:
    """Return the state after ``closed_step`` and the events at it. Raises ValueError if steps do not ascend."""
    step = closed_step.step
    if state.step is not None and step <= state.step:
        raise ValueError(f"steps must ascend, got {step} after {state.step}; replay from a state before step {step}")
    if state.stopped_step is not None:
        return replace(state, step=step), ()
    if closed_step.rebaseline:
        state = replace(
            state,
            surge=forget_lengths(state.surge),
            rules=forget_baselines(state.rules, configuration.rules),
            reward=state.reward.forgotten(),
        )
    refused, values, refusals = refuse_values(state.refused, step, closed_step.values)
    reward, falls = advance_reward(
        state.reward, step, values.get(REWARD_KEY), configuration.reward, values.get(K3), values.get(K3_PER_ENTROPY)
    )
    learning = cache(partial(is_rising, reward, configuration.reward))
    judged = without_largest_token(values)
    rules, events = advance_rules(state.rules, step, judged, configuration.rules, learning)
    corroborated = _corroborates(rules, reward, configuration.rules)
    lengths = StepLengths(
        values.get(LENGTH_KEY), values.get(LONGEST_KEY), values.get(TRUNCATED_KEY), values.get(REWARD_KEY)
    )
    surge, detections = advance_surge(state.surge, step, lengths, corroborated, configuration.surge)
    rate = finite_or_none(values.get(LEARNING_RATE_KEY))
    units = state.rate_units
    if rate is not None:
        # Assume this step's rate for all steps since the previous one.
        steps = 1 if state.step is None else step - state.step
        units = (units or 0) + steps * int(math.ldexp(min(rate, LARGEST_RATE), RATE_UNIT_BITS))
    total = None if units is None else units / 2**RATE_UNIT_BITS
    found = tuple(event_of(each, configuration.surge, configuration.schedule, total, rate) for each in detections)
    reading = _reading(step, values, rules, configuration.rules, reward)
    if closed_step.faulty:
        reading = replace(reading, k3=None, k3_at_lag_0=None)
    if rate == 0.0:
        # Nothing to scale. Before the first update all weights are equal, however old the sampler's.
        k3, at_lag_0 = (None, None) if units else (reading.k3, reading.k3_at_lag_0)
        lag = reading.lag if units else 0.0
        reading = replace(reading, k3=k3, lag=lag, k3_at_lag_0=at_lag_0, update=None, lowered=())
    loop = advance_loop(state.loop, reading, configuration.loop)
    return WarningState(step, surge, rules, reward, loop, units, refused), refusals + events + falls + found


def _reading(
    step: int, values: Mapping[str, float], rules: RulesState, of_step: Sequence[ThresholdRule], reward: RewardState
) -> Reading:
    k3, lag, update, rate, tokens, last_step, length = (
        finite_or_none(values.get(key))
        for key in (K3, LAG_KEY, UPDATE_KEY, LEARNING_RATE_KEY, TOKENS_KEY, LAST_STEP_KEY, LENGTH_KEY)
    )
    lowered = tuple(rule.name for rule in of_step if rule.effect == "halve" and rules.firing(rule) is not None)
    if update is None and reward.lowers_rate:
        lowered = (*lowered, FALL_RULE)
    at_lag_0 = StepLags.of(values).numerics
    return Reading(k3, lag, at_lag_0, update, rate, tokens, lowered, step, last_step, length)


def stop(state: WarningState, step: int, error: Exception) -> tuple[WarningState, tuple[Event, ...]]:
    """Return the state of a run whose detectors raised at ``step``, and the event that reports it."""
    event = Event(
        rule="detection_stopped",
        step=step,
        value=float(step),
        threshold=float(step),
        severity="warning",
        why=f"Detection stopped at step {step}: {type(error).__name__}: {error}. Uploads go on; no later step of this "
        "run is judged.",
        what_to_do="Report this error. Detection starts again with the next release, or when rules or ranges change.",
        evidence={"cause": "data", "source": "an error in a detector"},
    )
    return replace(state, step=step, stopped_step=step), (event,)


def is_corroborated(state: WarningState, configuration: WarningConfiguration) -> bool:
    """Return whether a mismatch, gradient or reward rule is firing that corroborates a surge of the lengths."""
    return _corroborates(state.rules, state.reward, configuration.rules)


def _corroborates(state: RulesState, reward: RewardState, rules: Sequence[ThresholdRule]) -> bool:
    return reward.is_low or any(rule.corroborates_surge and state.firing(rule) is not None for rule in rules)


def holding_signals(state: WarningState, configuration: WarningConfiguration) -> tuple[OpenSignal, ...]:
    """Return the firing rules that hold the learning rate while they fire, oldest first."""
    firing = [
        OpenSignal(rule.name, fired)
        for rule in configuration.rules
        if rule.effect == "hold" and (fired := state.rules.firing(rule)) is not None
    ]
    return tuple(sorted(firing, key=lambda signal: (signal.fired_step, signal.rule)))
