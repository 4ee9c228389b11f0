"""The learning-rate advice of a run."""

from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

from foreshock.api.records import from_attributes
from foreshock.learning_rate.advice import Applied, effect_in_words, lever_in_words
from foreshock.learning_rate.decisions import AdviceState
from foreshock.learning_rate.length_decay import HORIZON, point_at
from foreshock.learning_rate.modes import BESIDE_THE_RATE, BesideTheRate
from foreshock_service.platform.database.tables import Run
from foreshock_service.present.pages import rendering
from foreshock_service.present.pages.figures.overview import ScaleCurve
from foreshock_service.present.pages.presenters.viewing import Viewing, last_steps
from foreshock_service.runs import listing
from foreshock_service.watch.advice import schemas, service


@dataclass(frozen=True, slots=True)
class Action:
    """An operator's decision that a form offers."""

    kind: str
    text: str
    meaning: str


HOLD = Action("hold", "Hold", "Freeze the scale until it is released.")
RELEASE = Action("release", "Release", "Continue the schedule from here.")
HALVE = Action("halve", "Halve now", "Halve the scale once, from the next step on.")
HOLD_LEVER = Action("hold", "Hold", "Freeze it until it is released.")
RELEASE_LEVER = Action("release", "Release", "Let the service decide on it again.")
APPLY_LEVER = Action("apply", "Apply it", "Apply mode: trainers that ask get it.")
SHADOW_LEVER = Action("shadow", "Stop applying", "Shadow mode: it is only shown.")
RAISE = Action("raise", "Raise once", "Take one halving back, from the next step on.")
APPLY = Action("apply", "Apply it", "Apply mode: trainers that ask get the advised scale.")
SHADOW = Action("shadow", "Stop applying", "Shadow mode: the trainer gets 1.0, the advice is only shown.")

# A plan without an end is drawn at least this many steps beyond now.
SHORTEST_OUTLOOK = 20
BOUNDARIES_AHEAD = 4


def stairs_of(state: AdviceState, end: int) -> list[tuple[int, float]]:
    """Return (step, scale from this step on) up to `end`, beginning at step 0.

    They cover the whole log; an answer to a trainer has only the newest points.
    """
    changes = {0}
    for point, following in zip_longest(state.points, state.points[1:]):
        last = end if following is None else min(end, following.step - 1)
        if point.boundary is not None:
            changes.update(range(point.boundary, last + 1, point.period))
        falling = range((point.loop_step or 0), min((point.loop_step or 0) + HORIZON, last) + 1)
        changes.update([point.step, *(step for step in falling if step >= point.step)])
    stairs: list[tuple[int, float]] = []
    for step in sorted(step for step in changes if step <= end):
        scale = state.scale(step)
        if not stairs or stairs[-1][1] != scale:
            stairs.append((step, scale))
    return stairs


def lowered_in_words(state: AdviceState, now: int) -> str | None:
    falls = [step for (_, before), (step, scale) in pairwise(stairs_of(state, now)) if scale < before]
    if not falls:
        return None
    step, by = falls[-1], "the control loop"
    point, before = point_at(state.points, step), point_at(state.points, step - 1).count(step - 1)
    if point.count(step) > before:
        by = "an operator" if point.halvings > before else "the schedule"
    return f"lowered by {by} at step {step}"


def advice_of(viewing: Viewing, run_id: str) -> schemas.AdviceRead:
    return service.read_snapshot(viewing.session, viewing.principal, run_id).advice(None)


def advice_panel(viewing: Viewing, run: Run, baseline: Run | None) -> dict[str, Any] | None:
    """Return the advice as it is served, with the actions that would change it now; None before the first closed step.

    `baseline` is the run to compare with; the panel has a sentence that compares the two.
    """
    snapshot = service.read_snapshot(viewing.session, viewing.principal, run.id)
    advice = snapshot.advice(None)
    if advice.observed_step is None:
        return None
    applied = None if advice.applied is None else from_attributes(Applied, advice.applied)
    lowered = None
    if advice.phase == "decaying":
        lowered = lowered_in_words(snapshot.state, advice.observed_step)
    schedule = None
    if advice.schedule is not None:
        schedule = (
            f"× {advice.schedule.factor:g} every {advice.schedule.decay_period} steps (surge at "
            f"{advice.schedule.surge_step}), floor {advice.schedule.floor:g}"
        )
    return {
        "advice": advice,
        "why": snapshot.remedy.why,
        "phase": rendering.PHASES[advice.phase] if lowered is None else lowered,
        "schedule": schedule,
        "applied": effect_in_words(advice.mode, advice.revision, applied),
        "baseline": None if baseline is None else _beside(viewing, run, baseline),
        # The rate of a run that has ended cannot be changed.
        "actions": _actions(advice) if run.state == "running" else (),
        "levers": [_lever(snapshot, name, advice.observed_step + 1) for name in BESIDE_THE_RATE],
    }


def _lever(snapshot: service.Snapshot, name: BesideTheRate, step: int) -> dict[str, Any]:
    state = snapshot.state.lever(name)
    actions = [
        HOLD_LEVER if state.held_from_step is None else RELEASE_LEVER,
        APPLY_LEVER if state.mode == "shadow" else SHADOW_LEVER,
    ]
    return {
        "name": name,
        "title": f"{name.capitalize()}, {state.mode} mode",
        "is_advised": state.advised(step) is not None or state.held_from_step is not None,
        "sentence": lever_in_words(name, state, step, snapshot.reported.get(name)),
        "actions": actions if snapshot.run.state == "running" else (),
    }


def _beside(viewing: Viewing, run: Run, baseline: Run) -> str | None:
    """Return the newest rewards of both runs and the baseline's sum of learning rates; None if a reward is missing."""
    reward = listing.newest_or_reported(viewing.session, "reward", last_steps(viewing.session, [run, baseline]))
    if len(reward) < len({run.id, baseline.id}):
        return None
    words = f"{baseline.name or baseline.key}: reward {rendering.number(reward[baseline.id])}"
    other = advice_of(viewing, baseline.id)
    if other.learning_rate_sum is not None:
        words += f", Σ η {rendering.number(other.learning_rate_sum)}, scale {rendering.number(other.advised_scale)}"
    return f"{words}; here reward {rendering.number(reward[run.id])}"


def scale_curve(viewing: Viewing, run: Run) -> ScaleCurve | None:
    """Return the staircase of the scale; None before the first closed step."""
    snapshot = service.read_snapshot(viewing.session, viewing.principal, run.id)
    state, advice = snapshot.state, snapshot.advice(None)
    if advice.observed_step is None:
        return None
    now = advice.observed_step
    end = now + max(SHORTEST_OUTLOOK, now // 10)
    if state.schedule is not None and state.scale(now) > state.schedule.floor:
        end = now + BOUNDARIES_AHEAD * state.schedule.decay_period
    applied, acknowledged = advice.applied, []
    if applied is not None and applied.scale is not None:
        acknowledged.append((applied.step, applied.scale))
    elif applied is not None and run.initial_learning_rate:
        acknowledged.append((applied.step, applied.learning_rate / run.initial_learning_rate))
    return ScaleCurve(stairs_of(state, end), now, end, advice.mode == "shadow", acknowledged)


def _actions(advice: schemas.AdviceRead) -> list[Action]:
    """Return the actions that would change something now; the service refuses all others."""
    actions = [RELEASE if advice.phase == "held" else HOLD]
    if advice.advised_scale > advice.floor:
        actions.append(HALVE)
    if advice.advised_scale < 1:
        actions.append(RAISE)
    return [*actions, APPLY if advice.mode == "shadow" else SHADOW]
