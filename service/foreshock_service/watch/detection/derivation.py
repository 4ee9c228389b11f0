"""Derive what the detectors find from a run's closed steps, in step order: each state comes from the last.

A derivation starts from the newest stored state before the first changed step, goes over the later closed steps outside
the writer, and is stored in one short transaction: all of them if some were judged before, as after a late shard; else
a few at a time. Everything is derived from the stored history, so the result does not depend on the order in which data
arrived.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock.diagnosis import detectors, rule
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import DetectorSnapshot, Run
from foreshock_service.runs import due, events, runs
from foreshock_service.watch.detection import history, states

_logger = logging.getLogger(__name__)

_STEPS_READ_AT_ONCE = 100

_NEW_STEPS_AT_ONCE = 25
"""Steps that are judged for the first time and stored in one transaction, with a decision for each: about 20 ms."""

_PAUSE_SECONDS = 0.0002
"""Pause after each step of about 0.3 ms, so that request threads run without waiting 5 ms for Python to switch."""


@dataclass(frozen=True, slots=True)
class DetectionDerived:
    """What the detectors found in some steps: their events, each with its attempt, and the state after the last step.

    The steps are those from `from_step` on, or one step that is judged for the first time: decisions follow from each,
    whether the steps came one by one or together. The steps up to `judged_until` had been judged before: nobody is told
    of what an upgrade, or late data of a run that has ended, changes there. −1: there are none.
    """

    run_id: str
    from_step: int
    events: Sequence[tuple[rule.Event, int]]
    state: detectors.WarningState
    configuration: detectors.WarningConfiguration
    judged_until: int = -1


@dataclass(slots=True)
class Derivation:
    """The detectors' results over the steps from `first` on: the state after the last step, the events at all steps,
    and the states to be stored.

    `seen` are the marks that it includes; `is_whole`: it reaches the newest closed step; `can_be_stored`: it reaches a
    step after which it can be stored. The steps up to `judged` were
    judged before; `judged_again` is the state after them. Nobody is told of what it finds up to `judged_until`.
    """

    watched: history.WatchedRun
    state: detectors.WarningState
    first: int = 0
    judged: int = -1
    judged_until: int = -1
    seen: set[str] = field(default_factory=set)
    is_whole: bool = False
    can_be_stored: bool = False
    events: list[tuple[rule.Event, int]] = field(default_factory=list)
    milestones: list[states.StoredState] = field(default_factory=list)
    newest: deque[tuple[int, detectors.WarningState]] = field(
        default_factory=lambda: deque(maxlen=states.NEWEST_STATES)
    )
    judged_again: detectors.WarningState | None = None
    of_new_steps: list[detectors.WarningState] = field(default_factory=list)

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
            if closed.step > self.judged:
                self.of_new_steps.append(self.state)
            else:
                self.judged_again = self.state

    def go_back_before(self, step: int) -> bool:
        """Go back to the last milestone before `step`; return False if there is none."""
        if step > self.step:
            return True
        self.milestones = [each for each in self.milestones if each.step < step]
        if not self.milestones:
            return False
        self.state = self.milestones[-1].read() or detectors.WarningState()
        self.events = [each for each in self.events if each[0].step <= self.step]
        self.of_new_steps = [each for each in self.of_new_steps if each.step is not None and each.step <= self.step]
        self.newest.clear()
        if self.step <= self.judged:
            self.judged_again = self.state
        return True

    def found(self, run_id: str) -> list[DetectionDerived]:
        """Return what was found: in the steps that were judged before together, then in each new one."""
        common = (self.watched.configuration, self.judged_until)
        of_steps = defaultdict[int | None, list[tuple[rule.Event, int]]](list)
        before: list[tuple[rule.Event, int]] = []
        for each in self.events:
            (before if each[0].step <= self.judged else of_steps[each[0].step]).append(each)
        found = [
            DetectionDerived(run_id, state.step or 0, of_steps[state.step], state, *common)
            for state in self.of_new_steps
        ]
        if self.first <= self.judged or not found:
            found.insert(0, DetectionDerived(run_id, self.first, before, self.judged_again or self.state, *common))
        return found

    def to_store(self) -> list[states.StoredState]:
        """Return the states to be stored: one of each block, and the newest ones."""
        known = {each.step for each in self.milestones}
        newest = [self._stored(attempt, state) for attempt, state in self.newest if state.step not in known]
        return [*self.milestones, *newest]

    def _stored(self, attempt: int, state: detectors.WarningState, *, milestone: bool = False) -> states.StoredState:
        return states.stored_state(attempt, state, self.watched.digest, milestone=milestone)


def begin(session: Session, run_id: str, marks: Collection[due.Mark], begun: Derivation | None) -> Derivation | None:
    """Return the derivation that these marks ask for, or None if they ask for none.

    One that has `begun` goes on, from before the first step that has changed since; not if one of its marks is gone,
    since then another process has advanced the run meanwhile.
    """
    changed = {each.from_step for each in marks if each.from_step is not None}
    if not changed:
        return None
    run = session.get_one(Run, run_id)
    watched = history.watched_as(session, run)
    is_alone = begun is not None and begun.seen <= {each.id for each in marks}
    if begun is not None and is_alone and begun.watched.digest == watched.digest:
        unseen = [each.from_step for each in marks if each.from_step is not None and each.id not in begun.seen]
        if begun.go_back_before(min(unseen, default=begun.step + 1)):
            begun.seen |= {each.id for each in marks}
            begun.judged_until = max(begun.judged_until, *(each.judged_until for each in marks))
            return begun
    newest, first = states.newest(session, run_id), min(changed)
    derivation = Derivation(watched, states.newest_before(session, run_id, first, watched.digest))
    derivation.first = derivation.step + 1
    derivation.seen = {each.id for each in marks}
    derivation.judged_until = max(each.judged_until for each in marks)
    if newest is not None:
        derivation.judged = newest.step
        if run.state in runs.ENDED and derivation.first <= newest.step:
            # Late data of a run that has ended.
            derivation.judged_until = max(derivation.judged_until, newest.step)
    return derivation


def go_on(session: Session, run_id: str, derivation: Derivation, may_go_on: Callable[[], bool]) -> None:
    """Derive the closed steps after the last one, all or some new ones, as far as `may_go_on` allows."""
    only_new = derivation.first > derivation.judged
    at_once = _NEW_STEPS_AT_ONCE if only_new else _STEPS_READ_AT_ONCE
    while True:
        steps = history.closed_steps_after(session, run_id, derivation.step, derivation.watched, at_once)
        for step in steps:
            derivation.go_on([step])
            time.sleep(_PAUSE_SECONDS)
        derivation.is_whole = len(steps) < at_once
        derivation.can_be_stored = only_new or derivation.is_whole
        if derivation.can_be_stored or not may_go_on():
            return


def store(session: Session, run: Run, derivation: Derivation) -> list[DetectionDerived] | None:
    """Store the states of a derivation and return what it found, in order; None if one of its steps has changed since.

    If it is not whole, the marks that asked for its steps become one for the steps that are left. The run is locked.
    """
    changes = due.changes_up_to(session, run.id, derivation.step)
    if changes - derivation.seen:
        return None
    if history.watched_as(session, run).digest != derivation.watched.digest:
        return None
    if not derivation.is_whole:
        due.remove(session, changes)
        due.mark(session, run.id, derivation.step + 1, judged_until=derivation.judged_until)
    if derivation.first <= derivation.judged:
        states.drop(session, run.id, derivation.first)
    states.store(session, run.id, derivation.to_store())
    return derivation.found(run.id)


def derive_after_resume(session: Session, started: events.AttemptStarted) -> None:
    """Delete the states from `resume_step` on, and mark that the run is judged again from there."""
    states.drop(session, started.run_id, started.resume_step)
    due.mark(session, started.run_id, started.resume_step)


def mark_outdated(database: Database) -> int:
    """Mark the runs whose detectors, rules or format of states are others since the start; return their number.

    A run that has ended keeps what was found with its release and rules.
    """
    outdated = []
    with database.read() as session:
        having = select(DetectorSnapshot.run_id).where(DetectorSnapshot.run_id == Run.id).exists()
        going_on = (Run.deleted_at_us.is_(None), Run.state.not_in(runs.ENDED))
        for run in session.scalars(select(Run).where(*going_on, having)).all():
            newest = states.newest(session, run.id)
            if newest is None:
                continue
            if newest.configuration_digest != history.watched_as(session, run).digest or newest.read() is None:
                outdated.append((run.id, newest.step))
            time.sleep(_PAUSE_SECONDS)
    for run_id, step in outdated:
        database.write(partial(due.mark, run_id=run_id, from_step=0, judged_until=step))
    return len(outdated)
