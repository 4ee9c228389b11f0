"""The presenter of the advice: the panel, the curve of the scale, the step of the surge."""

from __future__ import annotations

from dataclasses import dataclass

from foreshock.learning_rate.advice import Applied, effect_in_words
from foreshock.learning_rate.schedule import LengthDecaySchedule, scale_at
from foreshock_service.platform.database.tables import Run
from foreshock_service.present.pages.figures.learning_rate import ScaleCurve
from foreshock_service.present.pages.formatting import MODES, PHASES, number, scale_in_words
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.present.pages.view_models import Action, AdvicePanel
from foreshock_service.watch.advice.schemas import AdviceRead
from foreshock_service.watch.advice.service import read_advice

HOLD = Action("hold", "Hold", "Freeze the scale until it is released")
RELEASE = Action("release", "Release", "Continue the schedule from here")
HALVE = Action("halve", "Halve now", "Halve the scale once, from the next step on")
RAISE = Action("raise", "Raise once", "Take one halving back, from the next step on")
APPLY = Action("apply", "Send it to the trainer", "Apply mode: trainers that ask get the advised scale")
SHADOW = Action("shadow", "Only show it", "Shadow mode: the trainer gets 1.0, the advice is only shown")

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

    @classmethod
    def of(cls, advice: AdviceRead) -> Scale:
        schedule = advice.schedule and LengthDecaySchedule.from_json(advice.schedule.model_dump())
        return cls(schedule or None, tuple(advice.rule_halvings), advice.factor, advice.floor)

    def at(self, step: int) -> float:
        return scale_at(self.schedule, self.halvings, step, self.factor, self.floor)

    def stairs(self, end: int) -> list[tuple[int, float]]:
        """Return (step, scale from this step on) up to `end`, beginning at step 0."""
        boundaries = self.schedule.boundaries_until(end) if self.schedule is not None else ()
        steps = sorted({0, *self.halvings, *boundaries})
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
    return AdvicePanel(
        scale=number(advice.advised_scale),
        mode=MODES[advice.mode],
        shadow=advice.mode == "shadow",
        headline=_headline(advice),
        reason=advice.reason,
        phase=PHASES[advice.phase],
        schedule=_schedule(advice),
        next_decay_step="none planned" if advice.next_decay_step is None else str(advice.next_decay_step),
        observed_step=str(advice.observed_step),
        revision=str(advice.revision),
        applied=_effect(advice),
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


def _headline(advice: AdviceRead) -> str:
    advised = scale_in_words(advice.advised_scale)
    if advice.mode == "shadow" and advice.advised_scale < 1:
        return f"Advised: {advised}. Shadow mode: the trainer gets 1.0."
    return f"Advised: {advised}."


def _schedule(advice: AdviceRead) -> str:
    if advice.schedule is None:
        return "none: no length surge so far" if not advice.rule_halvings else "none; halved by rules"
    rule = f"× {advice.schedule.factor:g} every {advice.schedule.decay_period} steps"
    return f"{rule} (surge at {advice.schedule.surge_step}), floor {advice.schedule.floor:g}"


def _effect(advice: AdviceRead) -> str:
    applied = None if advice.applied is None else Applied.from_json(advice.applied.model_dump())
    return effect_in_words(advice.mode, advice.revision, applied)


def _actions(advice: AdviceRead) -> list[Action]:
    """Return the actions that would change something now; the service refuses the others."""
    actions = [RELEASE if advice.phase == "held" else HOLD]
    if advice.advised_scale > advice.floor:
        actions.append(HALVE)
    if advice.advised_scale < 1:
        actions.append(RAISE)
    return [*actions, APPLY if advice.mode == "shadow" else SHADOW]
