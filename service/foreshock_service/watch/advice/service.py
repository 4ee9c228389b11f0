"""Advice: read it, wait for a change, acknowledge it, decide as an operator; and the log of decisions.

Decisions after detection, a resume or a change of mode are appended in the publisher's transaction with the run locked,
so revisions are consecutive.
"""

import dataclasses
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from foreshock.api.records import parse, to_json
from foreshock.clock import now_us
from foreshock.diagnosis.detectors import WarningConfiguration, WarningState, holding_signals
from foreshock.learning_rate import decisions, length_decay, reasons
from foreshock.learning_rate.modes import AdviceMode, Author, BesideTheRate, Lever
from foreshock.learning_rate.remedy import Remedy, decide_remedy, finding
from foreshock_service.platform import audit, problem, security
from foreshock_service.platform.database import engine, tables
from foreshock_service.runs import attempts, events, runs
from foreshock_service.watch import alerts, long_polls
from foreshock_service.watch.advice import remedies, schemas
from foreshock_service.watch.detection import derivation, history, states

STALE_AFTER_STEPS = 10
"""A trainer asks one or two steps ahead of what it has logged. Ten steps ahead means that no data arrives."""

_NEWEST_POINTS = 32
"""Points that are enough for the newest steps: a trainer is fewer steps ahead."""

WANT_WEIGHTS_EVERY = 50
WANT_WEIGHTS_EVERY_IN_ALARM = 10
"""Largest interval in steps at which weights are wanted while a critical alert is open."""


_logger = logging.getLogger(__name__)


class AdviceConflict(problem.ProblemError, status=409, problem_type="advice-conflict"):
    """An operator's decision that changes nothing, or an acknowledgement of an unknown revision."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The inputs of a run's advice at one time."""

    run: tables.Run
    version: str
    state: decisions.AdviceState
    detectors: WarningState
    configuration: WarningConfiguration
    opened: list[tables.Alert]
    remedy: Remedy
    applied: schemas.AppliedRead | None
    reported: dict[str, schemas.LeverAppliedRead]
    probed_every: int | None
    """Interval in steps of the automatic probes of the run's policy; None: no n-th step is probed."""

    def advice(self, step: int | None) -> schemas.AdviceRead:
        """Return the advice at `step`; None: at the step after the newest closed one."""
        run, state, detectors = self.run, self.state, self.detectors
        observed = detectors.step
        asked = step if step is not None else 0 if observed is None else observed + 1
        mode: AdviceMode = "apply" if run.advice_mode == "apply" else "shadow"
        advised = state.scale(asked)
        has_ended = run.state in runs.ENDED
        warming = detectors.watching(self.configuration.surge) == "warming"
        return schemas.AdviceRead(
            run=run.id,
            attempt=state.attempt,
            revision=state.revision,
            scale=advised if mode == "apply" else 1.0,
            advised_scale=advised,
            schedule=state.schedule,
            points=list(length_decay.newest_points(state.points)),
            control=self._control(),
            factor=state.factor,
            floor=state.floor,
            phase=state.phase(asked, warming),
            mode=mode,
            next_decay_step=None if has_ended else state.next_decay_step(asked),
            step=step,
            observed_step=observed,
            learning_rate_sum=detectors.learning_rate_sum,
            stale=step is not None and step - (-1 if observed is None else observed) > STALE_AFTER_STEPS,
            reason=reasons.advice_reason(state, detectors, self.configuration, mode, has_ended=has_ended),
            alerts=[schemas.AdviceAlertRead.model_validate(alert) for alert in self.opened],
            want_weights_at_step=self._wanted(asked),
            applied=self.applied,
        )

    def of_all_levers(self, step: int | None) -> schemas.AdviceOfLeversRead:
        """Return the advice of all levers at `step`; None: at the step after the newest closed one."""
        rate = self.advice(step)
        asked = step if step is not None else 0 if rate.observed_step is None else rate.observed_step + 1
        return schemas.AdviceOfLeversRead(
            run=self.run.id,
            attempt=self.state.attempt,
            revision=self.state.revision,
            step=step,
            remedy=self.remedy.name,
            why=self.remedy.why,
            rate=rate,
            correction=schemas.CorrectionRead.model_validate(self._lever("correction", asked)),
            rollback=schemas.RollbackRead.model_validate(self._lever("rollback", asked)),
        )

    def _control(self) -> schemas.ControlRead | None:
        loop, settings = self.detectors.loop, self.configuration.loop
        if not settings.enabled or (loop.static is None and loop.update is None):
            return None
        return schemas.ControlRead(
            driven=loop.driven,
            set_point=loop.set_point(settings),
            static=loop.static,
            update=loop.update,
            update_set_point=loop.update_point(settings),
            error=loop.error,
            finding=finding(loop, settings),
        )

    def _wanted(self, step: int) -> int | None:
        """Return the next step whose weights a probe needs: by the run's policy, more often during a critical alert."""
        if self.run.state != "running":
            return None
        every = self.probed_every or WANT_WEIGHTS_EVERY
        if any(alert.severity == "critical" for alert in self.opened):
            every = min(every, WANT_WEIGHTS_EVERY_IN_ALARM)
        return (step // every + 1) * every

    def _lever(self, name: BesideTheRate, step: int) -> dict[str, Any]:
        state = self.state.lever(name)
        return {
            **to_json(state),
            "value": state.at(step),
            "advised": state.advised(step),
            "points": state.points[-length_decay.POINTS_SENT :],
            "applied": self.reported.get(name),
        }


def read_snapshot(session: Session, principal: security.Principal, run_id: str) -> Snapshot:
    """Return the run's snapshot. Raises RunNotFound and RunDeleted."""
    run = runs.get_run(session, principal, run_id)
    # Read first: advice newer than its entity tag ends the next poll at once, but older advice would be kept.
    version = long_polls.read_versions(session, [run_id])[run_id].advice
    state = state_of(session, run_id)
    opened = list(alerts.open_alerts(session, run_id))
    detectors, configuration = states.newest_state(session, run_id), history.watched_as(session, run).configuration
    of_attempt = {"run_id": run_id, "attempt": state.attempt}
    done = tables.AdviceAcknowledgement
    newest = session.scalar(select(done).filter_by(**of_attempt).order_by(done.step.desc()).limit(1))
    applied = None if newest is None else schemas.AppliedRead.model_validate(newest)
    reports = session.scalars(select(tables.LeverAcknowledgement).filter_by(**of_attempt))
    reported = {row.lever: schemas.LeverAppliedRead.model_validate(row) for row in reports}
    policy = session.get(tables.ProbePolicy, run_id)
    probed_every = None if policy is None else policy.policy["every_steps"]
    found = Remedy()
    if run.state not in runs.ENDED:
        found = decide_remedy(remedies.situation_of(session, run, state, detectors, configuration.loop))
    return Snapshot(run, version, state, detectors, configuration, opened, found, applied, reported, probed_every)


def states_of_runs(session: Session, run_ids: Collection[str]) -> dict[str, decisions.AdviceState]:
    """Return the state of the advice of each run, for its newest steps; a run whose state cannot be read is absent."""
    table = tables.FoldedAdvice
    found = dict.fromkeys(run_ids, decisions.AdviceState())
    for run_id, state in session.execute(select(table.run_id, table.state).where(table.run_id.in_(run_ids))):
        try:
            found[run_id] = decisions.AdviceState.from_json(state)
        except Exception:
            del found[run_id]
    return found


def not_counted(session: Session, run_id: str, attempt: int | None, newest: int) -> schemas.ReportNotCounted | None:
    """Return why a report of `attempt` changes no advice; None if it is the newest one's. Attempt None: the newest."""
    if attempts.find_attempt(session, run_id, newest) is None:
        # The feed may ask after the run is registered and before its attempt is.
        return schemas.ReportNotCounted(newest_attempt=None, why="no attempt of the run has begun")
    if attempt is None or attempt == newest:
        return None
    why = f"attempt {newest} is the newest one of the run; what attempt {attempt} reports changes no advice"
    return schemas.ReportNotCounted(newest_attempt=newest, why=why)


def reporting(
    session: Session, principal: security.Principal, run_id: str, body: schemas.ReportOfStep
) -> tuple[int, int]:
    """Return the newest attempt and that of a report. Raises AdviceConflict for an unknown revision."""
    runs.get_run(session, principal, run_id)
    newest, newest_revision = newest_version(session, run_id)
    if body.revision > newest_revision:
        raise AdviceConflict(f"revision must be at most {newest_revision}, the newest of this run, got {body.revision}")
    # A trainer without a client may not know its attempt.
    attempt = body.attempt if body.attempt is not None else newest
    attempts.check_attempt(session, run_id, attempt)
    return newest, attempt


def operate(
    session: Session, principal: security.Principal, run_id: str, body: schemas.OperatorDecisionCreate
) -> schemas.AdviceOfLeversRead:
    """Add an operator's decision on a lever. Raises AdviceConflict if it changes nothing."""
    run = runs.lock_run(session, principal, run_id)
    if run.state in runs.ENDED:
        raise AdviceConflict(f"{reasons.RUN_HAS_ENDED} Its state is {run.state!r}; set it to 'running' if it goes on")
    state = state_of(session, run_id)
    try:
        decision = decisions.decide_as_operator(
            state, body.kind, observation_of(session, run_id, state), body.reason, body.seen_revision,
            body.lever, body.value,
        )  # fmt: skip
    except decisions.AdviceConflictError as error:
        raise AdviceConflict(str(error)) from error
    decided = append(session, run_id, state, decision)
    step = decision.effective_from_step
    before, after = ({"revision": each.revision, **_in_force(each, body.lever, step)} for each in (state, decided))
    audit.record(
        session, principal, f"advice.{body.kind}", run_id,
        project=run.project, run_id=run_id, before=before, after=after | {"reason": body.reason},
    )  # fmt: skip
    return read_snapshot(session, principal, run_id).of_all_levers(None)


def _in_force(state: decisions.AdviceState, lever: Lever, step: int) -> dict[str, Any]:
    if lever == "rate":
        return {"scale": state.scale(step)}
    value = state.lever(lever).advised(step)
    return {lever: None if value is None else dataclasses.asdict(value)}


def decide_after_detection(session: Session, derived: derivation.DetectionDerived) -> None:
    """Append the decisions that follow from the detectors' state after the newest active step."""
    run_id, state = derived.run_id, derived.state
    started = attempts.attempts_of_run(session, run_id)
    attempt = started[-1].attempt if started else 1
    advised, run = state_of(session, run_id), runs.find_run(session, run_id)
    assert run is not None
    known = remedies.situation_of(session, run, advised, state, derived.configuration.loop)
    observation = decisions.Observation(
        attempt=attempt,
        observed_step=-1 if state.step is None else state.step,
        trainer_step=_trainer_step(session, run_id, attempt),
        surge_step=state.surge_step,
        at_us=now_us(),
        schedule=derived.configuration.schedule,
        holds=holding_signals(state, derived.configuration),
        loop=state.loop,
        loop_settings=derived.configuration.loop,
        remedy=None if state.step is None else decide_remedy(known),
    )
    for decision in decisions.decide(advised, observation):
        advised = append(session, run_id, advised, decision)


def rewind_log(session: Session, started: events.AttemptStarted) -> None:
    """Append the rewind to `resume_step`, which drops the decisions beyond it; only if the attempt is the newest."""
    if not started.is_newest:
        return
    state = state_of(session, started.run_id)
    rewound = decisions.rewind(state, started.attempt, started.resume_step, now_us())
    append(session, started.run_id, state, rewound)


def record_mode(session: Session, changed: events.AdviceModeChanged) -> None:
    """Append the change of mode, so that polling trainers receive it."""
    state, mode, asked = state_of(session, changed.run_id), changed.mode, changed.asked
    if changed.lever != "rate":
        known = state.lever(changed.lever)
        if changed.by_trainer and known.mode_is_chosen:
            mode = None
        if mode is None and asked in (None, known.asked):
            return
    observation = observation_of(session, changed.run_id, state)
    author: Author = "trainer" if changed.by_trainer else "operator"
    decision = decisions.set_mode(state, mode, observation, author, changed.lever, asked)
    append(session, changed.run_id, state, decision)


def observation_of(session: Session, run_id: str, state: decisions.AdviceState) -> decisions.Observation:
    """Return the progress of the run, for a decision that does not come from the detectors."""
    observed = states.observed_steps(session, [run_id]).get(run_id, -1)
    return decisions.Observation(
        attempt=state.attempt,
        observed_step=observed,
        trainer_step=_trainer_step(session, run_id, state.attempt),
        surge_step=None,
        at_us=now_us(),
    )


def state_of(session: Session, run_id: str) -> decisions.AdviceState:
    """Return the state of the run's advice. One that cannot be read is folded from the log of decisions."""
    table = tables.FoldedAdvice
    stored = session.execute(select(table.state, table.earlier_points).filter_by(run_id=run_id)).first()
    if stored is None:
        return decisions.AdviceState()
    try:
        points = [*stored.earlier_points, *stored.state["points"]]
        return decisions.AdviceState.from_json({**stored.state, "points": points})
    except Exception:
        _logger.warning("the state of the advice of run %s is of another release; it is folded again", run_id)
        return decisions.fold(log_of(session, run_id))


def log_of(session: Session, run_id: str) -> list[decisions.Decision]:
    """Return the run's decisions in order of revision."""
    table = tables.AdviceDecision
    made = select(table.decision).where(table.run_id == run_id).order_by(table.revision)
    return [parse(decisions.Decision, decision) for decision in session.scalars(made)]


def append(
    session: Session, run_id: str, state: decisions.AdviceState, decision: decisions.Decision
) -> decisions.AdviceState:
    """Add a decision, and store and return the state after it."""
    row = {
        "run_id": run_id,
        "revision": decision.revision,
        "attempt": decision.attempt,
        "kind": decision.kind,
        "effective_from_step": decision.effective_from_step,
        "reason": decision.reason,
        "author": decision.author,
        "made_at_us": decision.at_us,
        "decision": to_json(decision),
    }
    engine.insert_rows(session, tables.AdviceDecision, [row])
    is_rewind = decision.kind == "rewind"
    after = decisions.fold(log_of(session, run_id)) if is_rewind else decisions.fold_on(state, decision)
    values = after.to_json()
    folded = {
        "run_id": run_id,
        "attempt": after.attempt,
        "revision": after.revision,
        "state": {**values, "points": values["points"][-_NEWEST_POINTS:]},
        "earlier_points": values["points"][:-_NEWEST_POINTS],
    }
    engine.upsert(session, tables.FoldedAdvice, [folded], ("run_id",))
    return after


def newest_version(session: Session, run_id: str) -> tuple[int, int]:
    """Return (attempt, revision) of the newest decision, as `fold` does; (1, 0) before any decision."""
    table = tables.FoldedAdvice
    row = session.execute(select(table.attempt, table.revision).where(table.run_id == run_id)).first()
    return (1, 0) if row is None else (row[0], row[1])


def _trainer_step(session: Session, run_id: str, attempt: int) -> int:
    """Return the newest step that a trainer of this attempt followed or acknowledged; −1 before any."""
    followed, done = tables.TrainerProgress.polled_step, func.max(tables.AdviceAcknowledgement.step)
    found = [session.scalar(select(each).filter_by(run_id=run_id, attempt=attempt)) for each in (followed, done)]
    return max(-1 if step is None else step for step in found)
