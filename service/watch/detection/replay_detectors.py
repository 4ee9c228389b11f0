"""Replay the detectors over the closed steps of a run when a step closes, changes, or an attempt starts.

Everything runs in the publisher's transaction with the run locked, so changes are handled one after the other; and
everything is derived from the stored history, so the result does not depend on the order in which data arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from sqlalchemy.orm import Session

from foreshock.early_warning.detectors import ClosedStep, WarningConfiguration, WarningState, advance
from foreshock.early_warning.events import Event
from foreshock.model_kind import ModelKind
from service.platform.events import EventBus
from service.runs.attempts.active_attempts import AttemptStart, active_attempt_of
from service.runs.attempts.service import attempts_of_run
from service.runs.events import AttemptStarted, ModelKindChanged, StepEvent
from service.runs.runs.service import model_kind_of
from service.watch.detection import repository
from service.watch.detection.events import DetectorsReplayed
from service.watch.detection.history import closed_steps_after
from service.watch.detection.repository import Snapshot

MILESTONE_STEPS = 25
"""A state is kept for good in every block of so many steps: a late shard replays at most one block before it."""

RECENT_STATES = 4
"""The newest states are kept as well: scalars come just after their step, and scores some steps later."""


@cache
def configuration_of(model_kind: ModelKind | None) -> tuple[WarningConfiguration, str]:
    """Return the configuration for a kind of model (None: unknown) and its digest."""
    configuration = WarningConfiguration.for_model(model_kind)
    return configuration, configuration.digest()


def observe_changed_step(events: EventBus, session: Session, changed: StepEvent) -> None:
    """Replay the detectors from a step that has closed or changed. Steps of superseded tails change nothing."""
    attempts = attempts_of_run(session, changed.run_id)
    if active_attempt_of(attempts, changed.step) == changed.attempt:
        replay_from(events, session, changed.run_id, attempts, changed.step)


def restart_from_resume(events: EventBus, session: Session, started: AttemptStarted) -> None:
    """Go back to `resume_step`: drop the states of superseded steps and derive the ones before it again."""
    repository.drop_snapshots(session, started.run_id, started.resume_step)
    attempts = attempts_of_run(session, started.run_id)
    replay_from(events, session, started.run_id, attempts, started.resume_step)


def replay_with_new_ranges(events: EventBus, session: Session, changed: ModelKindChanged) -> None:
    """Replay the detectors from the first step: the healthy ranges of another kind of model hold."""
    replay_from(events, session, changed.run_id, attempts_of_run(session, changed.run_id), 0)


def replay_from(
    events: EventBus, session: Session, run_id: str, attempts: Sequence[AttemptStart], from_step: int
) -> None:
    """Replay the detectors over the active history from `from_step` on and publish DetectorsReplayed."""
    configuration, digest = configuration_of(model_kind_of(session, run_id))
    snapshot = repository.newest_snapshot_of_run(session, run_id)
    if snapshot is not None and not _precedes(snapshot, from_step, attempts, digest):
        # The step is late, or follows a rewind: the snapshots from it on are derived again.
        snapshot = repository.newest_snapshot(session, run_id, attempts, from_step, digest)
        repository.drop_snapshots(session, run_id, 0 if snapshot is None else snapshot.step + 1)
    state = WarningState() if snapshot is None else WarningState.from_bytes(snapshot.state)
    after = -1 if snapshot is None else snapshot.step
    steps = closed_steps_after(session, run_id, attempts, after, configuration.keys)
    found: list[tuple[Event, int]] = []
    rows = []
    for number, (closed, attempt) in enumerate(steps):
        previous = state.step
        state, new = advance(state, closed, configuration)
        found.extend((event, attempt) for event in new)
        milestone = previous is None or previous // MILESTONE_STEPS != closed.step // MILESTONE_STEPS
        if milestone or number >= len(steps) - RECENT_STATES:
            rows.append(_snapshot(run_id, attempt, closed, milestone, state, digest))
    repository.add_snapshots(session, rows)
    repository.drop_passing_snapshots(session, run_id, keep=RECENT_STATES)
    events.publish(session, DetectorsReplayed(run_id, attempts, after + 1, found, state, configuration))


def _precedes(snapshot: Snapshot, from_step: int, attempts: Sequence[AttemptStart], configuration_digest: str) -> bool:
    """Return whether a replay from `from_step` can begin after the run's newest snapshot."""
    return (
        snapshot.step < from_step
        and snapshot.configuration_digest == configuration_digest
        and active_attempt_of(attempts, snapshot.step) == snapshot.attempt
    )


def _snapshot(
    run_id: str, attempt: int, closed: ClosedStep, milestone: bool, state: WarningState, digest: str
) -> dict[str, object]:
    return {
        "run_id": run_id,
        "attempt": attempt,
        "step": closed.step,
        "configuration_digest": digest,
        "milestone": milestone,
        "state": state.to_bytes(),
    }
