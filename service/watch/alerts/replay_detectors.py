"""The observer of closed steps: replay the detectors from the state before the change, then follow what they say.

Everything runs in the transaction that closed or changed the step, with the run locked, so steps are seen one after
the other; and everything is derived from the stored history, so the order in which data arrived makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from foreshock.early_warning.detectors import ClosedStep, WarningConfiguration, WarningState, advance
from foreshock.early_warning.events import Event
from service.platform.context import ClosedStepValues
from service.platform.database.tables import Attempt
from service.runs.attempts.active_attempts import surviving_attempt
from service.runs.attempts.repository import of_run
from service.watch.advice import decision_log
from service.watch.advice.waking import wake_after_commit
from service.watch.alerts import repository
from service.watch.alerts.history import closed_steps_after
from service.watch.alerts.reconcile import Replay, close_superseded, match

MILESTONE_STEPS = 25
"""A state is kept for good in every block of so many steps: a late shard replays at most one block before it."""

RECENT_STATES = 4
"""The newest states are kept as well: scalars come just after their step, and scores some steps later."""

CONFIGURATION = WarningConfiguration()
"""One for all runs: nothing tells a mixture of experts from a dense model yet, so dense ranges hold."""

_DIGEST = CONFIGURATION.digest()


def observe_closed_step(session: Session, closed: ClosedStepValues) -> None:
    """Take in a step that has closed, or whose values changed. Steps of superseded tails change nothing."""
    attempts = of_run(session, closed.run_id)
    if surviving_attempt(attempts, closed.step) != closed.attempt:
        return
    rewatch(session, closed.run_id, attempts, closed.step)


def begin_attempt(session: Session, run_id: str, attempt: int, resume_step: int) -> None:
    """Go back to `resume_step`: alerts of superseded steps are resolved, decisions beyond it dropped."""
    attempts = of_run(session, run_id)
    repository.drop_snapshots(session, run_id, resume_step)
    close_superseded(session, run_id, attempts)
    decision_log.rewind_to(session, run_id, attempt, resume_step)
    # The states just before the resume were not kept: derive them again, and with them what still follows.
    rewatch(session, run_id, attempts, resume_step)
    wake_after_commit(session, run_id)


def rewatch(session: Session, run_id: str, attempts: Sequence[Attempt], from_step: int) -> None:
    """Replay the detectors over the surviving history from `from_step` on, and bring alerts and advice in line."""
    snapshot = repository.newest_snapshot(session, run_id, attempts, from_step, _DIGEST)
    state = WarningState() if snapshot is None else WarningState.from_bytes(snapshot.state)
    after = -1 if snapshot is None else snapshot.step
    steps = closed_steps_after(session, run_id, attempts, after, CONFIGURATION.keys)
    repository.drop_snapshots(session, run_id, after + 1)
    events: list[tuple[Event, int]] = []
    rows = []
    for number, (closed, attempt) in enumerate(steps):
        previous = state.step
        state, new = advance(state, closed, CONFIGURATION)
        events.extend((event, attempt) for event in new)
        milestone = previous is None or previous // MILESTONE_STEPS != closed.step // MILESTONE_STEPS
        if milestone or number >= len(steps) - RECENT_STATES:
            rows.append(_snapshot(run_id, attempt, closed, milestone, state))
    repository.add_snapshots(session, rows)
    _forget_passing(session, run_id, attempts)
    changed = match(session, Replay(run_id, attempts, after + 1, events))
    decided = decision_log.follow(session, run_id, attempts, state, CONFIGURATION)
    if changed or decided:
        wake_after_commit(session, run_id)


def _snapshot(run_id: str, attempt: int, closed: ClosedStep, milestone: bool, state: WarningState) -> dict[str, object]:
    return {
        "run_id": run_id,
        "attempt": attempt,
        "step": closed.step,
        "configuration_digest": _DIGEST,
        "milestone": milestone,
        "state": state.to_bytes(),
    }


def _forget_passing(session: Session, run_id: str, attempts: Sequence[Attempt]) -> None:
    recent = repository.newest_snapshot_steps(session, run_id, attempts, RECENT_STATES)
    if len(recent) == RECENT_STATES:
        repository.drop_passing_snapshots(session, run_id, min(recent))
