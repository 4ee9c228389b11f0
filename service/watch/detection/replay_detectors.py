"""Replay the detectors over the closed steps of a run when a step closes, changes, or an attempt starts.

Everything runs in the publisher's transaction with the run locked, so changes are handled one after the other; and
everything is derived from the stored history, so the result does not depend on the order in which data arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from sqlalchemy.orm import Session

from foreshock.early_warning.detectors import ClosedStep, WarningConfiguration, WarningState, advance
from foreshock.early_warning.events import Event
from foreshock.early_warning.stretches import advance_over
from foreshock_service.platform.events import EventBus
from foreshock_service.runs.attempts.active_attempts import AttemptStart, active_attempt_of
from foreshock_service.runs.attempts.service import attempts_of_run
from foreshock_service.runs.events import (
    AttemptStarted,
    ModelKindChanged,
    ScalarNamesChanged,
    ScalarsChanged,
    StepEvent,
)
from foreshock_service.watch.detection import repository, states
from foreshock_service.watch.detection.configurations import watched_run
from foreshock_service.watch.detection.events import DetectorsReplayed, ReplayDue
from foreshock_service.watch.detection.history import History, closed_steps_after
from foreshock_service.watch.detection.repository import Due, Snapshot
from foreshock_service.watch.detection.states import MILESTONE_STEPS, RECENT_STATES
from foreshock_service.watch.rules.events import RulesChanged

SPARSE_MILESTONE_STEPS = 2_000
"""As MILESTONE_STEPS, of steps that a replay over a long history has left far behind: so many take milliseconds."""

STEPS_IN_TRANSACTION = 50
"""Steps that are replayed in the transaction that changed one: every other write waits for it."""


def observe_changed_step(events: EventBus, session: Session, changed: StepEvent) -> None:
    """Replay the detectors from a step that has closed or changed.

    Steps of superseded tails change nothing, and neither do scalars that no detector reads.
    """
    if isinstance(changed, ScalarsChanged) and not _is_read(session, changed):
        return
    attempts = attempts_of_run(session, changed.run_id)
    if active_attempt_of(attempts, changed.step) == changed.attempt:
        replay_from(events, session, changed.run_id, attempts, changed.step)


def restart_from_resume(events: EventBus, session: Session, started: AttemptStarted) -> None:
    """Go back to `resume_step`: drop the states of superseded steps and derive the ones before it again."""
    repository.drop_snapshots(session, started.run_id, started.resume_step)
    attempts = attempts_of_run(session, started.run_id)
    due = repository.due_replay(session, started.run_id)
    if due is not None:
        # A replay that is under way has read the superseded steps.
        _defer(events, session, started.run_id, due, started.resume_step, started.resume_step)
    replay_from(events, session, started.run_id, attempts, started.resume_step)


def replay_all(
    events: EventBus, session: Session, changed: ModelKindChanged | ScalarNamesChanged | RulesChanged
) -> None:
    """Replay the detectors from the first step: other ranges or rules hold, or other scalars are read."""
    attempts = attempts_of_run(session, changed.run_id)
    replay_from(events, session, changed.run_id, attempts, 0, repository.ALL_STEPS)


def replay_from(
    events: EventBus,
    session: Session,
    run_id: str,
    attempts: Sequence[AttemptStart],
    from_step: int,
    through_step: int | None = None,
) -> None:
    """Replay the detectors over the active history from `from_step` on and publish DetectorsReplayed.

    `through_step` is the last step that changed; None: only `from_step` did. A replay over more than
    STEPS_IN_TRANSACTION is due instead: `late_replays.py` makes it after the commit.
    """
    watched = watched_run(session, run_id)
    configuration, digest = watched.configuration, watched.digest
    snapshot = repository.newest_snapshot_of_run(session, run_id)
    state = WarningState()
    if snapshot is not None and _precedes(snapshot, from_step, attempts, digest):
        state = states.state_of(session, snapshot, run_id, attempts, watched)
    elif snapshot is not None:
        # The step is late, or follows a rewind: the snapshots from it on are derived again.
        state = states.newest_before(session, run_id, attempts, from_step, digest)
        due = repository.due_replay(session, run_id)
        if due is not None or snapshot.step - _step_of(state) > STEPS_IN_TRANSACTION:
            _defer(events, session, run_id, due, from_step, from_step if through_step is None else through_step)
            return
        repository.drop_snapshots(session, run_id, _step_of(state) + 1)
    replay = Replay(state)
    replay.go_on(closed_steps_after(session, run_id, attempts, replay.step, watched), configuration)
    repository.store_snapshots(session, run_id, replay.snapshots(run_id, digest), keep=RECENT_STATES)
    first = _step_of(state) + 1
    events.publish(session, DetectorsReplayed(run_id, attempts, first, replay.events, replay.state, configuration))


@dataclass(slots=True)
class Replay:
    """The detectors over some steps, in order: the state after the last one, and the events at all of them."""

    state: WarningState
    events: list[tuple[Event, int]] = field(default_factory=list)
    milestones: list[tuple[int, int, WarningState]] = field(default_factory=list)
    recent: deque[tuple[int, int, WarningState]] = field(default_factory=lambda: deque(maxlen=RECENT_STATES))

    @property
    def step(self) -> int:
        """The last step; −1 before any."""
        return _step_of(self.state)

    def go_on(self, steps: Sequence[tuple[ClosedStep, int]], configuration: WarningConfiguration) -> None:
        """Go on over the next steps, each with its attempt."""
        for closed, attempt in steps:
            previous = self.state.step
            self.state, new = advance(self.state, closed, configuration)
            self.events.extend((event, attempt) for event in new)
            if previous is None or previous // MILESTONE_STEPS != closed.step // MILESTONE_STEPS:
                self.milestones.append((attempt, closed.step, self.state))
            self.recent.append((attempt, closed.step, self.state))

    def go_over(self, history: History, configuration: WarningConfiguration, sparse_until: int) -> None:
        """Go on over the next steps at once. Up to step `sparse_until` few milestones are kept."""
        closed, count = history.closed, len(history.closed)
        before = np.concatenate(([self.step], closed.steps[:-1]))
        block = np.where(closed.steps <= sparse_until, SPARSE_MILESTONE_STEPS, MILESTONE_STEPS)
        milestones = set(np.flatnonzero(before // block != closed.steps // block).tolist())
        recent = set(range(max(count - RECENT_STATES, 0), count))
        ends = {index + 1 for index in milestones | recent | {max(count - RECENT_STATES, 0) - 1}}
        for first, end in pairwise(sorted({0, count} | ends)):
            self.state, new = advance_over(self.state, closed.part(first, end), configuration)
            places = np.searchsorted(closed.steps, [event.step for event in new]).tolist()
            self.events.extend((event, history.attempts[place]) for event, place in zip(new, places, strict=True))
            last = end - 1
            if last in milestones:
                self.milestones.append((history.attempts[last], self.step, self.state))
            if last in recent:
                self.recent.append((history.attempts[last], self.step, self.state))

    def snapshots(self, run_id: str, digest: str) -> list[dict[str, Any]]:
        """Return the rows of the milestones and of the newest states."""
        milestones = {step for _, step, _ in self.milestones}
        recent = [each for each in self.recent if each[1] not in milestones]
        return [
            {
                "run_id": run_id,
                "attempt": attempt,
                "step": step,
                "configuration_digest": digest,
                "milestone": step in milestones,
                "identity": states.remember(state),
                "state": state.to_bytes() if step in milestones else None,
            }
            for attempt, step, state in (*self.milestones, *recent)
        ]

    def end_at(self, step: int) -> None:
        """Drop what follows a milestone, as if the history ended with it."""
        self.milestones = [each for each in self.milestones if each[1] <= step]
        self.events = [each for each in self.events if each[0].step <= step]
        self.recent.clear()
        self.state = self.milestones[-1][2]


def _step_of(state: WarningState) -> int:
    return -1 if state.step is None else state.step


def _is_read(session: Session, changed: ScalarsChanged) -> bool:
    return not changed.names.isdisjoint(watched_run(session, changed.run_id).names)


def _defer(events: EventBus, session: Session, run_id: str, due: Due | None, from_step: int, through_step: int) -> None:
    changed = Due(from_step, through_step, 1)
    if due is not None:
        changed = Due(min(due.from_step, from_step), max(due.through_step, through_step), due.changes + 1)
    repository.put_due_replay(session, run_id, changed)
    events.publish(session, ReplayDue(run_id))


def _precedes(snapshot: Snapshot, from_step: int, attempts: Sequence[AttemptStart], configuration_digest: str) -> bool:
    """Return whether a replay from `from_step` can begin after the run's newest snapshot."""
    return (
        snapshot.step < from_step
        and snapshot.configuration_digest == configuration_digest
        and active_attempt_of(attempts, snapshot.step) == snapshot.attempt
    )
