"""The log of advice: decisions after detection, a resume, or a change of mode.

Everything runs in the publisher's transaction with the run locked, so revisions are consecutive.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.diagnosis.detectors import holding_signals, open_signals
from foreshock.learning_rate.decisions import Mode, Observation, decide, fold, rewind, set_mode
from foreshock_service.runs.events import AdviceModeChanged, AttemptStarted
from foreshock_service.watch.advice import repository
from foreshock_service.watch.detection.derivation import DetectionDerived
from foreshock_service.watch.detection.states import observed_steps


def decide_after_detection(session: Session, derived: DetectionDerived) -> None:
    """Append the decisions that follow from the detectors' state after the newest active step."""
    run_id, state = derived.run_id, derived.state
    attempt = max((each.attempt for each in derived.attempts), default=1)
    observation = Observation(
        attempt=attempt,
        observed_step=-1 if state.step is None else state.step,
        trainer_step=repository.trainer_step(session, run_id, attempt),
        surge_step=state.surge_step,
        signals=open_signals(state, derived.configuration),
        at_us=now_us(),
        schedule=derived.configuration.schedule_at(-1 if state.surge_step is None else state.surge_step),
        holds=holding_signals(state, derived.configuration),
    )
    decisions = decide(repository.log_of(session, run_id), observation)
    for decision in decisions:
        repository.append(session, run_id, decision)


def rewind_log(session: Session, started: AttemptStarted) -> None:
    """Append the rewind to `resume_step`, which drops the decisions beyond it."""
    log = repository.log_of(session, started.run_id)
    repository.append(session, started.run_id, rewind(log, started.attempt, started.resume_step, now_us()))


def record_mode(session: Session, changed: AdviceModeChanged) -> None:
    """Append the change of mode, so that trainers that poll receive it."""
    log = repository.log_of(session, changed.run_id)
    mode: Mode = "apply" if changed.mode == "apply" else "shadow"
    decision = set_mode(log, mode, observation_of(session, changed.run_id), "operator")
    repository.append(session, changed.run_id, decision)


def observation_of(session: Session, run_id: str) -> Observation:
    """Return how far the run is, for a decision that the detectors did not make."""
    state = fold(repository.log_of(session, run_id))
    observed = observed_steps(session, [run_id]).get(run_id, -1)
    return Observation(
        attempt=state.attempt,
        observed_step=observed,
        trainer_step=repository.trainer_step(session, run_id, state.attempt),
        surge_step=None,
        signals=(),
        at_us=now_us(),
    )
