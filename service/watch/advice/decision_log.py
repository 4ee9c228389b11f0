"""What adds to the log of advice besides an operator: the detectors' word, a resume, and a change of mode.

All of it runs in the caller's transaction with the run locked, so revisions follow one another.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.early_warning.decisions import Author, Mode, Observation, decide, fold, rewind, set_mode
from foreshock.early_warning.detectors import WarningConfiguration, WarningState, open_signals
from service.platform.database.tables import Attempt
from service.watch.advice import repository
from service.watch.advice.waking import wake_after_commit


def follow(
    session: Session,
    run_id: str,
    attempts: Sequence[Attempt],
    state: WarningState,
    configuration: WarningConfiguration,
) -> bool:
    """Decide what follows from the detectors' state after the newest surviving step; whether anything did."""
    log = repository.log_of(session, run_id)
    attempt = max((each.attempt for each in attempts), default=1)
    observation = Observation(
        attempt=attempt,
        observed_step=-1 if state.step is None else state.step,
        trainer_step=repository.trainer_step(session, run_id, attempt),
        surge_step=state.surge_step,
        signals=open_signals(state, configuration),
        at_us=now_us(),
    )
    decisions = decide(log, observation)
    for decision in decisions:
        repository.append(session, run_id, decision)
    return bool(decisions)


def rewind_to(session: Session, run_id: str, attempt: int, resume_step: int) -> None:
    """Note that an attempt begins at `resume_step`."""
    repository.append(session, run_id, rewind(repository.log_of(session, run_id), attempt, resume_step, now_us()))


def record_mode(session: Session, run_id: str, previous: str, mode: str, author: Author = "operator") -> None:
    """Note that the run went from `previous` to `mode` (`shadow` or `apply`), so that waiting trainers hear of it."""
    if mode == previous:
        return
    log = repository.log_of(session, run_id)
    known: Mode = "apply" if mode == "apply" else "shadow"
    repository.append(session, run_id, set_mode(log, known, observation_of(session, run_id), author))
    wake_after_commit(session, run_id)


def observation_of(session: Session, run_id: str) -> Observation:
    """How far the run is, for a decision that does not come from the detectors."""
    state = fold(repository.log_of(session, run_id))
    snapshot = repository.newest_snapshot(session, run_id)
    return Observation(
        attempt=state.attempt,
        observed_step=-1 if snapshot is None else snapshot.step,
        trainer_step=repository.trainer_step(session, run_id, state.attempt),
        surge_step=None,
        signals=(),
        at_us=now_us(),
    )
