"""The state of the detectors, for nouns that read it."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy.orm import Session

from foreshock.early_warning.detectors import WarningState
from foreshock_service.runs.attempts.service import attempts_of_run
from foreshock_service.watch.detection import repository, states
from foreshock_service.watch.detection.configurations import watched_run


def observed_steps(session: Session, run_ids: Collection[str]) -> dict[str, int]:
    """Return the newest step that the detectors have seen of each run; runs without one are absent."""
    return repository.newest_steps(session, run_ids)


def newest_state(session: Session, run_id: str) -> WarningState:
    """Return the detectors' state after the newest active closed step; the initial state before any."""
    snapshot = repository.newest_snapshot_of_run(session, run_id)
    if snapshot is None:
        return WarningState()
    return states.state_of(session, snapshot, run_id, attempts_of_run(session, run_id), watched_run(session, run_id))
