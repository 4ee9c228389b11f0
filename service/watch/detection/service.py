"""The state of the detectors, for nouns that read it."""

from __future__ import annotations

from sqlalchemy.orm import Session

from foreshock.early_warning.detectors import WarningState
from service.watch.detection import repository


def newest_state(session: Session, run_id: str) -> WarningState:
    """Return the detectors' state after the newest active closed step; the initial state before any."""
    snapshot = repository.newest_snapshot_of_run(session, run_id)
    return WarningState() if snapshot is None else WarningState.from_bytes(snapshot.state)
