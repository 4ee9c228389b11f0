"""Derive what the detectors find from a run's closed steps: state by state with `advance`, in step order.

A step that closes, or changes a few steps late, is derived in the transaction that changed it, with the run locked. A
change that many steps follow (a late shard, other rules, an upgrade) is noted as due instead, and `background.py`
derives the run from the last good state outside the writer.

Everything is derived from the stored history, so the result does not depend on the order in which data arrived.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sqlalchemy.orm import Session

from foreshock.diagnosis import detectors, rule
from foreshock_service.platform.context import EventBus
from foreshock_service.runs.attempts import is_active
from foreshock_service.runs.events import (
    AttemptStarted,
    ModelKindChanged,
    ScalarNamesChanged,
    ScalarsChanged,
    StepEvent,
    StepKey,
)
from foreshock_service.watch.detection import history, states
from foreshock_service.watch.rules.service import RulesChanged

_logger = logging.getLogger(__name__)

STEPS_IN_TRANSACTION = 50
"""Steps that are derived in the transaction that changed one: every other write waits for it, about 20 ms."""


@dataclass(frozen=True, slots=True)
class DetectionDerived:
    """The events of all active closed steps from `from_step` on, each with its attempt, and the state after the newest
    step. Published with the run locked.
    """

    run_id: str
    from_step: int
    events: Sequence[tuple[rule.Event, int]]
    state: detectors.WarningState
    configuration: detectors.WarningConfiguration


@dataclass(slots=True)
class Derivation:
    """The detectors over some steps, in order: the state after the last one, the events at all of them, and the states
    to be stored.
    """

    watched: history.WatchedRun
    state: detectors.WarningState
    events: list[tuple[rule.Event, int]] = field(default_factory=list)
    milestones: list[states.StoredState] = field(default_factory=list)
    newest: deque[tuple[int, detectors.WarningState]] = field(
        default_factory=lambda: deque(maxlen=states.NEWEST_STATES)
    )

    @property
    def step(self) -> int:
        """The last step; −1 before any."""
        return -1 if self.state.step is None else self.state.step

    def go_on(self, steps: Iterable[tuple[detectors.ClosedStep, int]]) -> None:
        """Go on over the next steps, each with its attempt."""
        for closed, attempt in steps:
            before, is_first = self.step, self.state.step is None
            try:
                self.state, new = detectors.advance(self.state, closed, self.watched.configuration)
            except Exception as error:
                # Uploads of this run and the detection of the others go on.
                _logger.exception("the detectors raised at step %d", closed.step)
                self.state, new = detectors.stop(self.state, closed.step, error)
            self.events.extend((event, attempt) for event in new)
            if is_first or before // states.STEPS_OF_A_BLOCK != closed.step // states.STEPS_OF_A_BLOCK:
                self.milestones.append(self._stored(attempt, self.state, milestone=True))
            self.newest.append((attempt, self.state))

    def go_back_before(self, step: int) -> bool:
        """Forget the steps from `step` on, and a few before it; return False if there is no state to go back to."""
        if step > self.step:
            return True
        self.milestones = [each for each in self.milestones if each.step < step]
        if not self.milestones:
            return False
        self.state = detectors.WarningState.from_bytes(self.milestones[-1].state)
        self.events = [each for each in self.events if each[0].step <= self.step]
        self.newest.clear()
        return True

    def copied(self) -> Derivation:
        """Return a copy that goes on by itself."""
        return Derivation(
            self.watched, self.state, list(self.events), list(self.milestones), deque(self.newest, states.NEWEST_STATES)
        )

    def to_store(self) -> list[states.StoredState]:
        """Return the states to be stored: one of each block, and the newest ones."""
        known = {each.step for each in self.milestones}
        newest = [self._stored(attempt, state) for attempt, state in self.newest if state.step not in known]
        return [*self.milestones, *newest]

    def _stored(self, attempt: int, state: detectors.WarningState, *, milestone: bool = False) -> states.StoredState:
        assert state.step is not None
        return states.StoredState(attempt, state.step, self.watched.digest, milestone, state.to_bytes())


def derive_changed_step(events: EventBus, session: Session, changed: StepEvent) -> None:
    """Derive from a step that has closed or changed.

    Steps of superseded tails change nothing, and neither do scalars that no detector reads.
    """
    if isinstance(changed, ScalarsChanged) and changed.names.isdisjoint(
        history.watched_run(session, changed.run_id).names
    ):
        return
    if is_active(session, changed):
        derive_from(events, session, changed.run_id, changed.step)


def derive_after_resume(events: EventBus, session: Session, started: AttemptStarted) -> None:
    """Go back to `resume_step`: delete the states of superseded steps and derive the ones before it again."""
    states.drop(session, started.run_id, started.resume_step)
    if states.due(session, started.run_id) is not None:
        # A derivation that is under way has read the superseded steps.
        states.note_change(session, started.run_id, started.resume_step)
    derive_from(events, session, started.run_id, started.resume_step)


def derive_all(
    events: EventBus, session: Session, changed: ModelKindChanged | ScalarNamesChanged | RulesChanged
) -> None:
    """Derive from the first step: other ranges or rules hold, or other scalars are read."""
    derive_from(events, session, changed.run_id, 0)


def derive_from(events: EventBus, session: Session, run_id: str, from_step: int) -> None:
    """Derive the active history from `from_step` on and publish DetectionDerived; or note that it is due.

    While a derivation is due, steps that follow the newest state go on from it, so that alerts are not delayed.
    """
    watched = history.watched_run(session, run_id)
    derivation = Derivation(watched, detectors.WarningState())
    newest = states.newest(session, run_id)
    follows = None
    if newest is not None and newest.step < from_step and newest.configuration_digest == watched.digest:
        follows = newest.read() if is_active(session, StepKey(run_id, newest.attempt, newest.step)) else None
    if follows is not None:
        derivation.state = follows
    elif states.due(session, run_id) is not None:
        states.note_change(session, run_id, from_step)
        return
    else:
        # The step is late, follows a rewind or is the first: the states from it on are derived again.
        derivation.state = states.newest_before(session, run_id, from_step, watched.digest)
    first = derivation.step + 1
    steps = history.closed_steps_after(session, run_id, derivation.step, watched, STEPS_IN_TRANSACTION + 1)
    if len(steps) > STEPS_IN_TRANSACTION:
        states.note_change(session, run_id, from_step)
        return
    if follows is None:
        states.drop(session, run_id, first)
    derivation.go_on(steps)
    store(events, session, run_id, first, derivation)


def store(events: EventBus, session: Session, run_id: str, first: int, derivation: Derivation) -> None:
    """Store the states of a derivation from step `first` to the newest, and publish DetectionDerived."""
    states.store(session, run_id, derivation.to_store())
    configuration = derivation.watched.configuration
    derived = DetectionDerived(run_id, first, derivation.events, derivation.state, configuration)
    events.publish(session, derived)
