"""The learning-rate advice of a run, and its rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, get_args

from foreshock import page_addresses, severity
from foreshock.diagnosis.reward import COLLAPSE_RULE, FALL_RULE
from foreshock.diagnosis.rule import Cause, Effect, ThresholdRule
from foreshock.diagnosis.surge_state import RULES as SURGE_RULES
from foreshock.learning_rate.advice import Applied, effect_in_words
from foreshock.learning_rate.schedule import HORIZON, LengthDecaySchedule, LoopPoint, scale_at
from foreshock_service.platform.database.tables import Run
from foreshock_service.present.pages import rendering, view_models
from foreshock_service.present.pages.figures.overview import ScaleCurve
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.watch.advice.schemas import AdviceRead
from foreshock_service.watch.advice.service import read_advice
from foreshock_service.watch.rules.service import DELIVERY_RULES, RuleOfRun, rules_of_run


@dataclass(frozen=True, slots=True)
class Action:
    """An operator's decision that a form offers."""

    kind: str
    text: str
    meaning: str


@dataclass(frozen=True, slots=True)
class AdvicePanel:
    """The advice as it is served, with the actions that would change it now."""

    advice: AdviceRead
    mode: view_models.Label
    phase: str
    schedule: str | None
    applied: str
    actions: Sequence[Action]


HOLD = Action("hold", "Hold", "Freeze the scale until it is released.")
RELEASE = Action("release", "Release", "Continue the schedule from here.")
HALVE = Action("halve", "Halve now", "Halve the scale once, from the next step on.")
RAISE = Action("raise", "Raise once", "Take one halving back, from the next step on.")
APPLY = Action("apply", "Send it to the trainer", "Apply mode: trainers that ask get the advised scale.")
SHADOW = Action("shadow", "Only show it", "Shadow mode: the trainer gets 1.0, the advice is only shown.")

# A plan without an end is drawn at least this many steps beyond now.
SHORTEST_OUTLOOK = 20
BOUNDARIES_AHEAD = 4


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of every step, by the same rule as in trainers' clients."""

    schedule: LengthDecaySchedule | None
    halvings: tuple[int, ...]
    factor: float
    floor: float
    loop: tuple[LoopPoint, ...]

    @classmethod
    def of(cls, advice: AdviceRead) -> Scale:
        schedule = advice.schedule and LengthDecaySchedule.from_json(advice.schedule.model_dump())
        return cls(
            schedule or None,
            tuple(advice.halvings),
            advice.factor,
            advice.floor,
            tuple(LoopPoint(point.step, point.scale, point.fall) for point in advice.loop),
        )

    def at(self, step: int) -> float:
        return scale_at(self.schedule, self.halvings, step, self.factor, self.floor, self.loop)

    def stairs(self, end: int) -> list[tuple[int, float]]:
        """Return (step, scale from this step on) up to `end`, beginning at step 0."""
        boundaries = self.schedule.boundaries_until(end) if self.schedule is not None else ()
        loop = {step for point in self.loop for step in range(point.step, point.step + HORIZON + 1) if step <= end}
        steps = sorted({0, *self.halvings, *boundaries, *loop})
        stairs: list[tuple[int, float]] = []
        for step in steps:
            scale = self.at(step)
            if not stairs or stairs[-1][1] != scale:
                stairs.append((step, scale))
        return stairs

    def outlook(self, now: int) -> int:
        """Return the step up to which the plan is drawn."""
        if self.schedule is None or self.at(now) <= self.schedule.floor:
            return now + max(SHORTEST_OUTLOOK, now // 10)
        return now + BOUNDARIES_AHEAD * self.schedule.decay_period


def advice_of(viewing: Viewing, run_id: str) -> AdviceRead:
    """Return the advice at the step after the newest closed one."""
    return read_advice(viewing.session, viewing.principal, run_id, None)


def advice_panel(viewing: Viewing, run: Run) -> AdvicePanel | None:
    """Return the panel; None before the first closed step."""
    advice = advice_of(viewing, run.id)
    if advice.observed_step is None:
        return None
    applied = None if advice.applied is None else Applied.from_json(advice.applied.model_dump())
    return AdvicePanel(
        advice=advice,
        mode=rendering.MODES[advice.mode],
        phase=rendering.PHASES[advice.phase],
        schedule=_schedule(advice),
        applied=effect_in_words(advice.mode, advice.revision, applied),
        # The rate of a run that has ended cannot be changed.
        actions=_actions(advice) if run.state == "running" else (),
    )


def scale_curve(viewing: Viewing, run: Run) -> ScaleCurve | None:
    """Return the staircase of the scale; None before the first closed step."""
    advice = advice_of(viewing, run.id)
    if advice.observed_step is None:
        return None
    scale, now = Scale.of(advice), advice.observed_step
    end = scale.outlook(now)
    applied, acknowledged = advice.applied, []
    if applied is not None and applied.scale is not None:
        acknowledged.append((applied.step, applied.scale))
    elif applied is not None and run.initial_learning_rate:
        acknowledged.append((applied.step, applied.learning_rate / run.initial_learning_rate))
    return ScaleCurve(scale.stairs(end), now, end, advice.mode == "shadow", acknowledged)


def surge_step(viewing: Viewing, run_id: str) -> int | None:
    """Return the step of the surge on which the schedule is based; None without one."""
    schedule = advice_of(viewing, run_id).schedule
    return schedule.surge_step if schedule is not None else None


def _schedule(advice: AdviceRead) -> str | None:
    if advice.schedule is None:
        return None
    rule = f"× {advice.schedule.factor:g} every {advice.schedule.decay_period} steps"
    return f"{rule} (surge at {advice.schedule.surge_step}), floor {advice.schedule.floor:g}"


def _actions(advice: AdviceRead) -> list[Action]:
    """Return the actions that would change something now; the service refuses the others."""
    actions = [RELEASE if advice.phase == "held" else HOLD]
    if advice.advised_scale > advice.floor:
        actions.append(HALVE)
    if advice.advised_scale < 1:
        actions.append(RAISE)
    return [*actions, APPLY if advice.mode == "shadow" else SHADOW]


EFFECTS: Final[dict[Effect, str]] = {
    "none": "none on the learning rate",
    "hold": "holds the learning rate while it fires",
    "halve": "lets the control loop lower the learning rate while it fires",
}
CAUSES: Final[dict[Cause, str]] = {
    "mismatch": "Mismatch",
    "sampling": "Sampling",
    "policy": "Policy",
    "gradient": "Gradient",
    "length": "Lengths",
    "staleness": "Staleness",
    "data": "Data",
}


def rules_page(viewing: Viewing, run_id: str) -> view_models.RulesPage:
    """Return the page of the run's rules. Raises RunNotFound or RunDeleted."""
    found = rules_of_run(viewing.session, viewing.principal, run_id)
    run = found.run
    groups = {cause: [each for each in found.rules if each.rule.cause == cause] for cause in CAUSES}
    return view_models.RulesPage(
        run_name=run.name or run.key,
        run_address=page_addresses.run_page_path(run.project, run.key),
        project=run.project,
        forms_address=f"/runs/{run.id}/rules",
        model_kind=rendering.model_kind_in_words(run),
        groups=[
            view_models.RuleGroup(CAUSES[cause], [_card(each) for each in rules])
            for cause, rules in groups.items()
            if rules
        ],
        versions=[
            view_models.VersionRow(each.version, each.effective_from_step, rendering.moment(each.made_at_us), each.toml)
            for each in reversed(found.versions)
        ],
        first_step=0 if run.last_step is None else run.last_step + 1,
        toml=found.toml,
        severities=get_args(severity.Severity),
        effects=get_args(Effect),
        detectors=[
            _title(name) for name in (*sorted(set(SURGE_RULES.values())), COLLAPSE_RULE, FALL_RULE, *DELIVERY_RULES)
        ],
    )


def _card(found: RuleOfRun) -> view_models.RuleCard:
    rule = found.rule
    return view_models.RuleCard(
        name=rule.name,
        title=_title(rule.name),
        severity=view_models.Label(rule.severity, rendering.TONES[rule.severity]),
        threshold=threshold_in_words(rule),
        state=_state(found),
        reads=rule.key,
        evidence=_evidence(rule),
        changed=[f"{field} {_value(value)}, default {_value(before)}" for field, value, before in found.changes()],
        why=rule.why,
        what_to_do=rule.what_to_do,
        effect=EFFECTS[rule.effect],
        source=rule.source,
        form=view_models.RuleForm(
            absolute=_entered(rule.absolute),
            relative=_entered(rule.relative),
            minimum_duration="" if rule.pooled is not None else str(rule.minimum_duration),
            severity=rule.severity,
            effect=rule.effect,
            enabled=found.enabled,
            resets=found.default is not None and (not found.enabled or rule != found.default),
        ),
    )


def threshold_in_words(rule: ThresholdRule) -> str:
    """Return a rule's thresholds: `above 0.01 and above 3 × the baseline`."""
    base = "the baseline" if rule.reference is None else rule.reference
    bounds = [rendering.number(rule.absolute)] if rule.absolute is not None else []
    bounds += [f"{rendering.number(rule.relative)} × {base}"] if rule.relative is not None else []
    if rule.direction == "away":
        return " and ".join(f"farther than {bound} from {rendering.number(rule.ideal)}" for bound in bounds)
    return " and ".join(f"{rule.direction} {bound}" for bound in bounds)


def _evidence(rule: ThresholdRule) -> str:
    if rule.pooled is not None:
        steps = "the steps pooled"
    else:
        steps = "1 step" if rule.minimum_duration == 1 else f"{rule.minimum_duration} steps in a row"
    return f"{steps}, at lag 0 only" if rule.lag_zero_only else steps


def _state(found: RuleOfRun) -> view_models.Label | None:
    since = "" if found.since in (None, 0) else f" since step {found.since}"
    if not found.enabled:
        return view_models.Label(f"off{since}", "warning")
    if found.default is None:
        return view_models.Label(f"added{since}", "warning")
    return view_models.Label(f"changed{since}", "warning") if found.rule != found.default else None


def _title(name: str) -> str:
    return name.replace("_", " ")


def _entered(value: float | None) -> str:
    return "" if value is None else repr(value)


def _value(value: object) -> str:
    return rendering.number(value) if isinstance(value, float) else "none" if value is None else str(value)
