"""Derive what the detectors find from a run's closed steps, in step order: `advance` makes each state from the last.

A step that closes, or that changes a few steps late, is derived in the transaction that changed it, with the run
locked. If many steps follow the changed one (a late shard, another kind of model, an upgrade), the derivation is noted
as due, and `background.py` derives the run from the last good state outside the writer.

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
from foreshock_service.runs import runs
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

_logger = logging.getLogger(__name__)

STEPS_IN_TRANSACTION = 50
"""Most steps that are derived in the transaction that changed one: every other write waits for them, about 20 ms."""


@dataclass(frozen=True, slots=True)
class DetectionDerived:
    """Event: all detector events of the active closed steps from `from_step` on, each with its attempt, and the state
    after the newest step. Published with the run locked.

    The steps up to `judged_until` had been judged before: nobody is told of what an upgrade, or late data of a run that
    has ended, changes there. −1: there are none.
    """

    run_id: str
    from_step: int
    events: Sequence[tuple[rule.Event, int]]
    state: detectors.WarningState
    configuration: detectors.WarningConfiguration
    judged_until: int = -1


@dataclass(slots=True)
class Derivation:
    """The detectors' results over consecutive steps: the state after the last step, the events at all steps, and the
    states to be stored.
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
        """Advance over the next steps, each with its attempt."""
        for closed, attempt in steps:
            before, is_first = self.step, self.state.step is None
            try:
                self.state, new = detectors.advance(self.state, closed, self.watched.configuration)
            except Exception as error:
                # Only this run's detection stops: its uploads and the detection of other runs continue.
                _logger.exception("the detectors raised at step %d", closed.step)
                self.state, new = detectors.stop(self.state, closed.step, error)
            self.events.extend((event, attempt) for event in new)
            if is_first or before // states.STEPS_OF_A_BLOCK != closed.step // states.STEPS_OF_A_BLOCK:
                self.milestones.append(self._stored(attempt, self.state, milestone=True))
            self.newest.append((attempt, self.state))

    def go_back_before(self, step: int) -> bool:
        """Go back to the last milestone before `step`; return False if there is none."""
        if step > self.step:
            return True
        self.milestones = [each for each in self.milestones if each.step < step]
        if not self.milestones:
            return False
        self.state = self.milestones[-1].read() or detectors.WarningState()
        self.events = [each for each in self.events if each[0].step <= self.step]
        self.newest.clear()
        return True

    def copied(self) -> Derivation:
        """Return an independent copy."""
        return Derivation(
            self.watched, self.state, list(self.events), list(self.milestones), deque(self.newest, states.NEWEST_STATES)
        )

    def to_store(self) -> list[states.StoredState]:
        """Return the states to be stored: one of each block, and the newest ones."""
        known = {each.step for each in self.milestones}
        newest = [self._stored(attempt, state) for attempt, state in self.newest if state.step not in known]
        return [*self.milestones, *newest]

    def _stored(self, attempt: int, state: detectors.WarningState, *, milestone: bool = False) -> states.StoredState:
        return states.stored_state(attempt, state, self.watched.digest, milestone=milestone)


def derive_changed_step(events: EventBus, session: Session, changed: StepEvent) -> None:
    """Derive from a step that has closed or changed.

    Steps of superseded tails and scalars that no detector reads change nothing.
    """
    if isinstance(changed, ScalarsChanged) and changed.names.isdisjoint(
        history.watched_run(session, changed.run_id).names
    ):
        return
    if is_active(session, changed):
        derive_from(events, session, changed.run_id, changed.step)


def derive_after_resume(events: EventBus, session: Session, started: AttemptStarted) -> None:
    """Go back to `resume_step`: delete the states from it on, and derive again from the newest state before it."""
    states.drop(session, started.run_id, started.resume_step)
    if states.due(session, started.run_id) is not None:
        # A derivation already under way may have read the superseded steps.
        states.note_change(session, started.run_id, started.resume_step)
    derive_from(events, session, started.run_id, started.resume_step)


def derive_all(events: EventBus, session: Session, changed: ModelKindChanged | ScalarNamesChanged) -> None:
    """Derive from the first step, because ranges or the names of scalars have changed."""
    derive_from(events, session, changed.run_id, 0)


def derive_from(events: EventBus, session: Session, run_id: str, from_step: int) -> None:
    """Derive the active history from `from_step` on and publish DetectionDerived, or note that this is due.

    While a derivation is due, steps after the newest state are still derived from that state, so that alerts are not
    delayed.
    """
    watched = history.watched_run(session, run_id)
    derivation = Derivation(watched, detectors.WarningState())
    newest = states.newest(session, run_id)
    run = runs.find_run(session, run_id)
    has_ended = run is not None and run.state in runs.ENDED
    judged_until = newest.step if newest is not None and has_ended else -1
    follows = None
    if newest is not None and newest.step < from_step and newest.configuration_digest == watched.digest:
        follows = newest.read() if is_active(session, StepKey(run_id, newest.attempt, newest.step)) else None
    if follows is not None:
        derivation.state = follows
    elif states.due(session, run_id) is not None:
        states.note_change(session, run_id, from_step, judged_until)
        return
    else:
        # The step is late, the first one, or the first after a rewind: the states from it on are derived again.
        derivation.state = states.newest_before(session, run_id, from_step, watched.digest)
    first = derivation.step + 1
    steps = history.closed_steps_after(session, run_id, derivation.step, watched, STEPS_IN_TRANSACTION + 1)
    if len(steps) > STEPS_IN_TRANSACTION:
        states.note_change(session, run_id, from_step, judged_until)
        return
    if follows is None:
        states.drop(session, run_id, first)
    derivation.go_on(steps)
    store(events, session, run_id, first, derivation, judged_until)


def store(
    events: EventBus, session: Session, run_id: str, first: int, derivation: Derivation, judged_until: int
) -> None:
    """Store the states of a derivation from step `first` to the newest, and publish DetectionDerived."""
    states.store(session, run_id, derivation.to_store())
    configuration = derivation.watched.configuration
    derived = DetectionDerived(run_id, first, derivation.events, derivation.state, configuration, judged_until)
    events.publish(session, derived)
