"""Replay the detectors over the closed steps of a run when a step closes, changes, or an attempt starts.

Everything runs in the publisher's transaction with the run locked, so changes are handled one after the other; and
everything is derived from the stored history, so the result does not depend on the order in which data arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sqlalchemy.orm import Session

from foreshock.early_warning.detectors import ClosedStep, WarningConfiguration, WarningState, advance
from foreshock.early_warning.events import Event
from foreshock.model_kind import ModelKind
from service.platform.events import EventBus
from service.runs.attempts.active_attempts import AttemptStart, active_attempt_of
from service.runs.attempts.service import attempts_of_run
from service.runs.events import AttemptStarted, ModelKindChanged, ScalarsChanged, StepEvent
from service.runs.runs.service import model_kind_of
from service.watch.detection import repository
from service.watch.detection.events import DetectorsReplayed, ReplayDue
from service.watch.detection.history import SCALARS, closed_steps_after
from service.watch.detection.repository import Snapshot

MILESTONE_STEPS = 25
"""A state is kept for good in every block of so many steps: a late shard replays at most one block before it."""

STEPS_IN_TRANSACTION = 50
"""Steps that are replayed in the transaction that changed one: every other write waits for it."""

RECENT_STATES = 4
"""The newest states are kept as well: scalars come just after their step, and scores some steps later."""


@cache
def configuration_of(model_kind: ModelKind | None) -> tuple[WarningConfiguration, str]:
    """Return the configuration for a kind of model (None: unknown) and its digest."""
    configuration = WarningConfiguration.for_model(model_kind)
    return configuration, configuration.digest()


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
        _defer(events, session, started.run_id, due, started.resume_step)
    replay_from(events, session, started.run_id, attempts, started.resume_step)


def replay_with_new_ranges(events: EventBus, session: Session, changed: ModelKindChanged) -> None:
    """Replay the detectors from the first step: the healthy ranges of another kind of model hold."""
    replay_from(events, session, changed.run_id, attempts_of_run(session, changed.run_id), 0)


def replay_from(
    events: EventBus, session: Session, run_id: str, attempts: Sequence[AttemptStart], from_step: int
) -> None:
    """Replay the detectors over the active history from `from_step` on and publish DetectorsReplayed.

    A replay over more than STEPS_IN_TRANSACTION is due instead: `late_replays.py` makes it after the commit.
    """
    configuration, digest = configuration_of(model_kind_of(session, run_id))
    snapshot = repository.newest_snapshot_of_run(session, run_id)
    if snapshot is not None and not _precedes(snapshot, from_step, attempts, digest):
        # The step is late, or follows a rewind: the snapshots from it on are derived again.
        newest = snapshot.step
        snapshot = repository.newest_snapshot(session, run_id, attempts, from_step, digest)
        due = repository.due_replay(session, run_id)
        if due is not None or newest - (-1 if snapshot is None else snapshot.step) > STEPS_IN_TRANSACTION:
            _defer(events, session, run_id, due, from_step)
            return
        repository.drop_snapshots(session, run_id, 0 if snapshot is None else snapshot.step + 1)
    replay = Replay.after(snapshot)
    replay.go_on(closed_steps_after(session, run_id, attempts, replay.step, configuration.keys), configuration)
    repository.add_snapshots(session, replay.snapshots(run_id, digest))
    repository.drop_passing_snapshots(session, run_id, keep=RECENT_STATES)
    first = 0 if snapshot is None else snapshot.step + 1
    events.publish(session, DetectorsReplayed(run_id, attempts, first, replay.events, replay.state, configuration))


@dataclass(slots=True)
class Replay:
    """The detectors over some steps, in order: the state after the last one, and the events at all of them."""

    state: WarningState
    events: list[tuple[Event, int]] = field(default_factory=list)
    milestones: list[tuple[int, int, WarningState]] = field(default_factory=list)
    recent: deque[tuple[int, int, WarningState]] = field(default_factory=lambda: deque(maxlen=RECENT_STATES))

    @classmethod
    def after(cls, snapshot: Snapshot | None) -> Replay:
        """Begin after a snapshot; None: before the first step."""
        return cls(WarningState() if snapshot is None else WarningState.from_bytes(snapshot.state))

    @property
    def step(self) -> int:
        """The last step; −1 before any."""
        return -1 if self.state.step is None else self.state.step

    def go_on(self, steps: Sequence[tuple[ClosedStep, int]], configuration: WarningConfiguration) -> None:
        """Go on over the next steps, each with its attempt."""
        for closed, attempt in steps:
            previous = self.state.step
            self.state, new = advance(self.state, closed, configuration)
            self.events.extend((event, attempt) for event in new)
            if previous is None or previous // MILESTONE_STEPS != closed.step // MILESTONE_STEPS:
                self.milestones.append((attempt, closed.step, self.state))
            self.recent.append((attempt, closed.step, self.state))

    def snapshots(self, run_id: str, digest: str) -> list[dict[str, Any]]:
        """Return the rows of the milestones and of the newest states."""
        milestones = {step for _, step, _ in self.milestones}
        kept = [*self.milestones, *(each for each in self.recent if each[1] not in milestones)]
        return [
            {
                "run_id": run_id,
                "attempt": attempt,
                "step": step,
                "configuration_digest": digest,
                "milestone": step in milestones,
                "state": state.to_bytes(),
            }
            for attempt, step, state in kept
        ]


def _is_read(session: Session, changed: ScalarsChanged) -> bool:
    configuration, _ = configuration_of(model_kind_of(session, changed.run_id))
    return any(f"{SCALARS}:{name}" in configuration.keys for name in changed.names)


def _defer(events: EventBus, session: Session, run_id: str, due: tuple[int, int] | None, from_step: int) -> None:
    from_step, changes = (from_step, 0) if due is None else (min(due[0], from_step), due[1])
    repository.put_due_replay(session, run_id, from_step, changes + 1)
    events.publish(session, ReplayDue(run_id))


def _precedes(snapshot: Snapshot, from_step: int, attempts: Sequence[AttemptStart], configuration_digest: str) -> bool:
    """Return whether a replay from `from_step` can begin after the run's newest snapshot."""
    return (
        snapshot.step < from_step
        and snapshot.configuration_digest == configuration_digest
        and active_attempt_of(attempts, snapshot.step) == snapshot.attempt
    )
