"""The rules: published ranges and the run's own baseline, with hysteresis, minimum duration and cooldown.

A rule fires after its value was beyond the threshold for ``minimum_duration`` measured steps in a row, or, if it pools
steps, when the evidence of all of them is enough (``statistics.py``). It clears after ``minimum_duration`` steps back
within the hysteresis band, and then cannot fire for ``cooldown_steps``. A rule on the median of the newest five values
fires and clears with that median. Steps without a value count for neither. A rule without a relative threshold never
moves the learning rate: absolute ranges differ by model, device and precision.

Rules that fire for one cause form one episode, from the first that fires until none of them does.

Ranges are for dense bf16 models at lag 0. In steps whose rollouts lag behind the trainer, k3 is judged by lag: ranges
hold for the tokens at lag 0, if there are `least_tokens` of them, and rises are judged at each lag against its own
baseline (``lags.py``). Other quantities are known only for whole steps: their ranges are judged if nearly all tokens
are at lag 0, and their rises against the baseline of equal mean lag.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from foreshock.diagnosis.lags import NEWEST, Judged, Part, StepLags, judge, lags_in_words, name_of_baseline, parts_of
from foreshock.diagnosis.rule import Baseline, Event, ThresholdRule
from foreshock.diagnosis.statistics import AVERAGE_RUN_LENGTH, MEDIAN_VALUES, add_evidence, pooled_evidence
from foreshock.diagnosis.wording import as_clause, number, percent
from foreshock.json_values import finite_or_none


@dataclass(frozen=True, slots=True)
class RuleState:
    """A rule's consecutive steps beyond its threshold or back within it, when it fired and cleared, its evidence.

    ``evidence`` has a number for each bet of a rule that pools all steps, and the newest values of one that judges
    their median. ``began`` is the first of the newest steps in a row that have left the baseline, or without one are
    beyond the threshold.
    """

    beyond: int = 0
    back: int = 0
    fired_step: int | None = None
    cleared_step: int | None = None
    evidence: tuple[float, ...] = ()
    began: int | None = None

    def to_json(self) -> list[Any]:
        return [self.beyond, self.back, self.fired_step, self.cleared_step, list(self.evidence), self.began]

    @classmethod
    def from_json(cls, value: list[Any]) -> RuleState:
        beyond, back, fired_step, cleared_step, evidence, began = value
        return cls(beyond, back, fired_step, cleared_step, tuple(evidence), began)


@dataclass(frozen=True, slots=True)
class RulesState:
    """The states of all rules by name, all baselines by ``key@lag``, and the first step of each cause's episode."""

    rules: Mapping[str, RuleState] = field(default_factory=dict)
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    episodes: Mapping[str, int] = field(default_factory=dict)

    def firing(self, rule: ThresholdRule) -> int | None:
        """Return the step at which ``rule`` fired, None if it is not firing."""
        state = self.rules.get(rule.name)
        return None if state is None else state.fired_step

    def to_json(self) -> dict[str, Any]:
        return {
            "rules": {name: state.to_json() for name, state in sorted(self.rules.items())},
            "baselines": {name: list(baseline.logs) for name, baseline in sorted(self.baselines.items())},
            "episodes": dict(sorted(self.episodes.items())),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RulesState:
        return cls(
            {name: RuleState.from_json(state) for name, state in value["rules"].items()},
            {name: Baseline(tuple(logs)) for name, logs in value["baselines"].items()},
            dict(value["episodes"]),
        )


def forget_baselines(state: RulesState, rules: Sequence[ThresholdRule]) -> RulesState:
    """Return the state without baselines, counted steps and evidence.

    A firing rule keeps firing until its values are back, so its baselines are kept.
    """
    states = {name: replace(each, beyond=0, back=0, evidence=(), began=None) for name, each in state.rules.items()}
    held = {rule.baseline_name for rule in rules if rule.relative is not None and state.firing(rule) is not None}
    baselines = {name: each for name, each in state.baselines.items() if name.rpartition("@")[0] in held}
    return RulesState(states, baselines, state.episodes)


def advance_rules(
    state: RulesState,
    step: int,
    values: Mapping[str, float],
    rules: tuple[ThresholdRule, ...],
    learning: Callable[[], bool] = lambda: False,
) -> tuple[RulesState, tuple[Event, ...]]:
    """Return the state after a closed step and the events at it. NaN and ±inf count as missing values.

    ``learning`` returns whether the reward is rising; it is called only if a rule asks.
    """
    lags = StepLags.of(values)
    states = dict(state.rules)
    of_rules = [parts_of(rule, values, lags) for rule in rules]
    baselines = _with_values(state.baselines, values, rules, of_rules)
    events: list[tuple[Event, str]] = []
    for rule, parts in zip(rules, of_rules, strict=True):
        judged = judge(rule, parts, baselines)
        if judged is None:
            continue
        if rule.follows_learning and rule.is_beyond(judged.measured, judged.threshold) and learning():
            name = name_of_baseline(rule, parts[0].lag)
            baselines[name] = baselines[name].following(judged.measured)
            continue
        states[rule.name], event = _advance_rule(rule, states.get(rule.name, RuleState()), step, judged, lags)
        if event is not None:
            events.append((event, rule.cause))
    firing = {name: each.fired_step for name, each in states.items() if each.fired_step is not None}
    episodes = _episodes(state.episodes, firing, rules) if firing else {}
    told = [
        replace(event, evidence={**event.evidence, "episode": episodes.get(cause, step)})
        if event.change == "fired"
        else event
        for event, cause in events
    ]
    return RulesState(states, baselines, episodes), tuple(told)


def _with_values(
    baselines: Mapping[str, Baseline],
    values: Mapping[str, float],
    rules: tuple[ThresholdRule, ...],
    of_rules: Sequence[Sequence[Part]],
) -> dict[str, Baseline]:
    """Return the baselines with the values of a step, each added once even if several rules use it."""
    found, seen = dict(baselines), set[str]()
    for rule, parts in zip(rules, of_rules, strict=True):
        if rule.reference is not None:
            name, value = name_of_baseline(rule, NEWEST), finite_or_none(values.get(rule.reference))
            if value is not None:
                found[name] = Baseline().with_value(value) if value > 0.0 else found.get(name, Baseline())
            continue
        for part in parts:
            name = name_of_baseline(rule, part.lag)
            if name not in seen:
                seen.add(name)
                found[name] = found.get(name, Baseline()).with_value(rule.measure(part.value))
    return found


def _advance_rule(
    rule: ThresholdRule, state: RuleState, step: int, judged: Judged, lags: StepLags
) -> tuple[RuleState, Event | None]:
    evidence = state.evidence
    value = judged.measured
    threshold = judged.threshold
    if rule.pooled == "median":
        evidence = (*evidence, value)[-MEDIAN_VALUES:]
        if len(evidence) < MEDIAN_VALUES:
            return replace(state, evidence=evidence), None
        value = median(evidence)
    elif rule.pooled is not None and state.fired_step is None:
        # Deviations keep their sign.
        pooled = judged.value - rule.ideal if rule.pooled == "deviation" else value
        evidence = add_evidence(evidence, rule.pooled, pooled, threshold)
    # Counted up to the duration only, so that states with and without a late step become equal again.
    beyond = min(state.beyond + 1, rule.minimum_duration) if rule.is_beyond(value, threshold) else 0
    began = (step if state.began is None else state.began) if _has_left(rule, value, judged) else None
    back = min(state.back + 1, rule.minimum_duration) if rule.is_back(value, threshold) else 0
    if state.fired_step is None:
        cooling_down = state.cleared_step is not None and step <= state.cleared_step + rule.cooldown_steps
        if rule.pooled is None:
            changes = beyond >= rule.minimum_duration
        else:
            changes = beyond > 0 and (
                rule.pooled == "median" or pooled_evidence(evidence) >= math.log(AVERAGE_RUN_LENGTH)
            )
        changes = changes and not cooling_down
    else:
        changes = back >= (1 if rule.pooled == "median" else rule.minimum_duration)
    if not changes:
        # Not by `dataclasses.replace`, which takes six times as long: this runs for every rule at every step.
        return RuleState(beyond, back, state.fired_step, state.cleared_step, evidence, began), None
    event = _event(rule, step, value, judged, lags)
    if state.fired_step is None:
        if began is not None and began < step:
            event = replace(event, evidence={**event.evidence, "onset_step": began})
        return RuleState(beyond, back, step, state.cleared_step, evidence, began), event
    cleared = replace(event, change="cleared", fired_step=state.fired_step)
    return RuleState(beyond, back, None, step, (), began), cleared


def _has_left(rule: ThresholdRule, value: float, judged: Judged) -> bool:
    """Return whether a value is more than halfway, in logarithms, from the run's own baseline to the threshold.

    From the first such step in a row on, an alert is dated: a rise to five times the baseline began before it was one.
    """
    threshold = judged.threshold
    if rule.relative is not None and judged.level > 0.0 and threshold > 0.0:
        threshold = math.sqrt(threshold * judged.level)
    return rule.is_beyond(value, threshold)


def _episodes(before: Mapping[str, int], firing: Mapping[str, int], rules: Sequence[ThresholdRule]) -> dict[str, int]:
    """Return the first step of each cause's episode: a cause without a firing rule has none."""
    found: dict[str, int] = {}
    for rule in rules:
        fired = firing.get(rule.name)
        if fired is not None:
            first = before.get(rule.cause, fired)
            found[rule.cause] = min(found.get(rule.cause, first), first)
    return found


def _event(rule: ThresholdRule, step: int, value: float, judged: Judged, lags: StepLags) -> Event:
    """Return the event of a rule that fires at ``value``; its reason names the lags if only some are judged."""
    why = rule.why
    evidence: dict[str, float | int | str] = {
        "key": rule.key,
        "source": rule.source,
        "cause": rule.cause,
        "lag": int(judged.lag) if judged.lag.lstrip("-").isdigit() else judged.lag,
    }
    if judged.lags:
        share = lags.share(judged.lags)
        why = f"At {lags_in_words(judged.lags)} ({percent(share)} of the tokens), {as_clause(rule.why)}"
        if not math.isnan(judged.elsewhere):
            why += f" At lag 0 it is {number(judged.elsewhere)}."
        evidence |= {"tokens": judged.tokens, "share_of_tokens": share}
    if rule.pooled is None:
        evidence["measured_steps_in_a_row"] = rule.minimum_duration
    else:
        evidence["pooled"] = rule.pooled
        evidence |= (
            {"newest_values": MEDIAN_VALUES} if rule.pooled == "median" else {"average_run_length": AVERAGE_RUN_LENGTH}
        )
    if rule.least_tokens:
        evidence["least_tokens"] = rule.least_tokens
    if rule.effect != "none":
        evidence["effect"] = rule.effect
    if rule.absolute is not None:
        evidence["absolute_threshold"] = rule.absolute
    if rule.relative is not None and not math.isnan(judged.level):
        evidence["baseline"] = judged.level
        evidence["baseline_noise"] = judged.noise
        evidence["times_baseline"] = value / judged.level
    return Event(
        rule=rule.name,
        step=step,
        value=judged.value if rule.direction == "away" else value,
        threshold=judged.threshold,
        severity=rule.severity,
        why=why,
        what_to_do=rule.what_to_do,
        # A schedule aside, an absolute crossing alone never moves the learning rate.
        moves_learning_rate=rule.effect == "halve",
        evidence=evidence,
    )
