"""The service's advice, which gives the value of each lever at any step, and the trainer's acknowledgement of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, Protocol

from foreshock.api.records import parse
from foreshock.healthy_ranges import threshold_number
from foreshock.json_values import json_value
from foreshock.learning_rate.length_decay import DECAY_FACTOR, DECAY_FLOOR, Point, Schedule, point_at
from foreshock.learning_rate.levers import UNMOVED, Correction, LeverState, Rollback
from foreshock.learning_rate.modes import BESIDE_THE_RATE, BesideTheRate

AdvicePhase = Literal["warming", "watching", "decaying", "floor", "held"]
OperatorKind = Literal["halve", "raise", "hold", "release", "set"]
"""`halve` and `raise` are of the rate, `set` of the other levers; the others of each."""
DecisionKind = Literal["surge", "retract", "loop", "halve", "raise", "hold", "release", "rewind", "mode", "set"]


@dataclass(frozen=True, slots=True)
class AdviceAlert:
    """An open alert of the run; `severity` is "info", "warning" or "critical".

    Missing fields are empty, because a service of another release may rename them.
    """

    rule: str = ""
    step: int = 0
    severity: str = "info"
    why: str = ""
    what_to_do: str = ""


@dataclass(frozen=True, slots=True)
class Advice:
    """One answer of `GET /v1/runs/{run}/advice`: the rate, and the levers beside it.

    `points` are absolute: the scale of a step does not depend on when, how often or in which order answers arrived.
    Without further answers it never rises: halvings follow `schedule`, and the loop continues its last fall for a few
    steps, then stays. In mode "shadow", the default, `scale` returns 1.0.
    """

    run: str
    """The run's id."""
    attempt: int
    revision: int
    mode: str = "shadow"
    phase: str = "warming"
    schedule: Schedule | None = None
    observed_step: int = -1
    stale: bool = False
    reason: str = ""
    alerts: tuple[AdviceAlert, ...] = ()
    want_weights_at_step: int | None = None
    factor: float = DECAY_FACTOR
    floor: float = DECAY_FLOOR
    points: tuple[Point, ...] = ()
    correction: LeverState = UNMOVED
    rollback: LeverState = UNMOVED
    remedy: str = "nothing"
    why: str = ""

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key of answers of one run, oldest first: attempt, revision, newest step that the service had seen."""
        return self.attempt, self.revision, self.observed_step

    def advised_scale(self, step: int) -> float:
        """Return the advised η(step) / η₀, in either mode."""
        return point_at(self.points, step).scale(step, self.factor, self.floor)

    def scale(self, step: int) -> float:
        """Return the factor to apply at `step`: `advised_scale`, or 1.0 in shadow mode."""
        return self.advised_scale(step) if self.mode == "apply" else 1.0

    def corrected(self, step: int) -> Correction | None:
        """Return the correction to apply at `step`; None: as the trainer is configured."""
        value = self.correction.at(step)
        return value if isinstance(value, Correction) else None

    def rolled_back(self, step: int) -> Rollback | None:
        """Return the checkpoint to go back to at `step`; None: go on."""
        value = self.rollback.at(step)
        return value if isinstance(value, Rollback) else None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Advice:
        """Parse a body of `advice` or `lr-advice`, or `to_json()`. Raises ValueError, KeyError or TypeError."""
        if isinstance(value.get("rate"), Mapping):
            value = {**value, **value["rate"]}
        schedule, observed, requested = map(value.get, ("schedule", "observed_step", "want_weights_at_step"))
        factor, floor = float(value.get("factor", DECAY_FACTOR)), float(value.get("floor", DECAY_FLOOR))
        if not 0.0 < factor < 1.0 or not 0.0 <= floor <= 1.0:
            raise ValueError(f"factor must be between 0 and 1 and floor from 0 to 1, got {factor} and {floor}")
        return cls(
            run=str(value["run"]),
            attempt=int(value["attempt"]),
            revision=int(value["revision"]),
            mode=str(value.get("mode", "shadow")),
            phase=str(value.get("phase", "")),
            schedule=None if schedule is None else parse(Schedule, schedule),
            observed_step=-1 if observed is None else int(observed),
            stale=bool(value.get("stale", False)),
            reason=str(value.get("reason") or ""),
            alerts=tuple(parse(AdviceAlert, alert) for alert in value.get("alerts") or ()),
            want_weights_at_step=None if requested is None else int(requested),
            factor=factor,
            floor=floor,
            points=tuple(sorted(map(Point.from_json, value.get("points") or ()), key=attrgetter("step"))),
            remedy=str(value.get("remedy") or "nothing"),
            why=str(value.get("why") or ""),
            **{name: LeverState.from_json(value.get(name) or {}) for name in BESIDE_THE_RATE},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the advice as plain JSON values for `from_json`, for a checkpoint."""
        document: dict[str, Any] = json_value(self)
        return document


NOT_ACKNOWLEDGED = "not acknowledged yet"
SHADOW_EFFECT = "shown only, the trainer gets 1.0"


@dataclass(frozen=True, slots=True)
class Applied:
    """The newest acknowledgement of a trainer: the step, the learning rate it used there, and the revision it knew.

    `scale` is the factor that it multiplied its base rate by; None if it reported the rate only.
    """

    step: int
    learning_rate: float
    revision: int
    scale: float | None = None

    @property
    def words(self) -> str:
        """Return what was applied, such as "applied 0.5 at step 201 (learning rate 5e-7)"."""
        if self.scale is None:
            return f"applied the learning rate {threshold_number(self.learning_rate)} at step {self.step}"
        return f"applied {self.scale:g} at step {self.step} (learning rate {threshold_number(self.learning_rate)})"


class Report(Protocol):
    """What a trainer reported of a lever beside the rate."""

    @property
    def step(self) -> int: ...
    @property
    def done(self) -> Correction | Rollback | None: ...
    @property
    def refused(self) -> str | None: ...


def lever_in_words(lever: BesideTheRate, state: LeverState, step: int, report: Report | None) -> str:
    """Return what a lever advises at `step`, and what the trainer did, as a sentence."""
    value = state.advised(step)
    if isinstance(value, Rollback):
        what = f"Go back to the checkpoint of step {value.step}: {value.command or value.path}"
    elif value is not None:
        what = f"{value.words[0].upper()}{value.words[1:]} since step {state.since(step)}"
    else:
        what = (
            "No correction: the loss is as the trainer is configured"
            if lever == "correction"
            else "No rollback is proposed"
        )
    held = "; held by an operator" if state.held_from_step is not None else ""
    if report is not None and report.refused is not None:
        effect = f"; the trainer refused it at step {report.step}: {report.refused.rstrip('.')}"
    elif report is not None and report.done is not None:
        effect = f"; the trainer did it at step {report.step}" if report.done == value else "; the trainer has another"
    elif value is None:
        effect = ""
    else:
        effect = "; not acknowledged" if state.mode == "apply" else "; shown only"
    return f"{what}{held}{effect}."


def effect_in_words(mode: str, revision: int, applied: Applied | None) -> str:
    """Return what is known of the effect of an advice of `revision` in `mode` on the trainer."""
    if mode != "apply":
        return SHADOW_EFFECT if applied is None else f"{SHADOW_EFFECT}; it {applied.words}"
    if applied is None:
        return NOT_ACKNOWLEDGED
    if applied.revision < revision:
        return f"{applied.words} of revision {applied.revision}; revision {revision} is {NOT_ACKNOWLEDGED}"
    return applied.words
