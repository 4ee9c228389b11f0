"""The stored states of the detectors.

A state is derived from the run's history. If it was deleted, or stored by another release, it is derived again. The
newest states are kept, because scalars arrive just after their step and scores some steps later. One state per block of
steps is kept too, so that after late data only the steps of one block are judged again.
"""

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, ScalarSelect, delete, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from foreshock.diagnosis.detectors import WarningState
from foreshock_service.platform.compression import zstd
from foreshock_service.platform.database.engine import insert_rows
from foreshock_service.platform.database.tables import DetectorSnapshot, Run

STEPS_OF_A_BLOCK = 25
"""Steps of a block; one state of each block is kept. A state takes about 6 kB."""

NEWEST_STATES = 4
"""Number of newest states that are kept as well."""

_logger = logging.getLogger(__name__)


class StoredState(NamedTuple):
    """The detectors' state after a step, as compressed `WarningState.to_bytes`; `milestone`: the one of its block."""

    attempt: int
    step: int
    configuration_digest: str
    milestone: bool
    state: bytes

    def read(self) -> WarningState | None:
        """Return the state; None if it is of a release with another format of states, or damaged."""
        try:
            state = WarningState.from_bytes(zstd.decompress(self.state))
            if state.step == self.step:
                return state
            raise ValueError(f"the state is of step {state.step}")
        except Exception:
            _logger.warning("the detectors' state after step %d is of another release; it is derived again", self.step)
            return None


def _newest_of(session: Session, run_id: str, *only: ColumnElement[bool]) -> StoredState | None:
    columns = (getattr(DetectorSnapshot, name) for name in StoredState._fields)
    of_run = select(*columns).where(DetectorSnapshot.run_id == run_id, *only)
    found = session.execute(of_run.order_by(DetectorSnapshot.step.desc()).limit(1)).first()
    return None if found is None else StoredState(*found)


def stored_state(attempt: int, state: WarningState, configuration_digest: str, *, milestone: bool) -> StoredState:
    """Return a state as it is stored."""
    assert state.step is not None
    return StoredState(attempt, state.step, configuration_digest, milestone, zstd.compress(state.to_bytes()))


def newest_state(session: Session, run_id: str) -> WarningState:
    """Return the detectors' state after the newest active closed step; the initial state before any.

    If the stored state cannot be read, return the initial state at that step, until the state is derived again.
    """
    stored = newest(session, run_id)
    if stored is None:
        return WarningState()
    return stored.read() or WarningState(step=stored.step)


def newest_of_run(column: InstrumentedAttribute[int]) -> ScalarSelect[int]:
    """Return the subquery, for a query of runs, of this column of a run's newest state; null without a state.

    It reads only the end of an index: a long run keeps a state of each block.
    """
    of_run = select(column).where(DetectorSnapshot.run_id == Run.id)
    return of_run.order_by(DetectorSnapshot.step.desc()).limit(1).scalar_subquery()


def observed_steps(session: Session, run_ids: Collection[str]) -> dict[str, int]:
    """Return the newest step of each run that the detectors have seen; runs without one are absent."""
    rows = session.execute(select(Run.id, newest_of_run(DetectorSnapshot.step)).where(Run.id.in_(run_ids)))
    return {run_id: step for run_id, step in rows if step is not None}


def newest(session: Session, run_id: str) -> StoredState | None:
    """Return the newest stored state; those of superseded steps are deleted when an attempt starts."""
    return _newest_of(session, run_id)


def newest_before(session: Session, run_id: str, before: int, configuration_digest: str) -> WarningState:
    """Return the newest state before the step `before`; the initial state without one, or if it cannot be read."""
    table = DetectorSnapshot
    only = (table.step < before, table.configuration_digest == configuration_digest)
    found = _newest_of(session, run_id, *only)
    return (None if found is None else found.read()) or WarningState()


def store(session: Session, run_id: str, states: Sequence[StoredState]) -> None:
    """Add states after the stored ones; delete states except the newest ones and one of each block."""
    insert_rows(session, DetectorSnapshot, [{"run_id": run_id, **state._asdict()} for state in states])
    table = DetectorSnapshot
    newest = select(table.step).where(table.run_id == run_id).order_by(table.step.desc())
    kept_from = newest.offset(NEWEST_STATES - 1).limit(1).scalar_subquery()
    passed = delete(table).where(table.run_id == run_id, table.milestone.is_(False), table.step < kept_from)
    session.execute(passed, execution_options={"synchronize_session": False})


def drop(session: Session, run_id: str, from_step: int) -> None:
    """Delete the states from `from_step` on, those of superseded steps included."""
    states = delete(DetectorSnapshot).where(DetectorSnapshot.run_id == run_id, DetectorSnapshot.step >= from_step)
    session.execute(states, execution_options={"synchronize_session": False})
