"""Removal of files after a grace: a backup that began with a database snapshot of before still finds them.

A row of `file_removals` names a file that the catalogue has given up, in the transaction that gave it up. The orphan
sweep leaves such files to this module.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock_service.platform.database.dialect import insert_if_absent
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import FileRemoval
from foreshock_service.platform.store.tokens import TokenStore

RemovalReason = Literal["retention", "deletion"]

_FILES_AT_ONCE = 200
# A round of the periodic task; the next one continues.
_FILES_PER_ROUND = 5_000
_logger = logging.getLogger(__name__)


def give_up_files(
    session: Session, files: Iterable[tuple[str, int]], reason: RemovalReason, grace_seconds: float
) -> None:
    """Remove files, given as (name, bytes), once the grace is over; in the transaction that gives them up."""
    due = now_us() + int(grace_seconds * 1e6)
    for name, size in files:
        insert_if_absent(session, FileRemoval, {"file": name, "file_bytes": size, "reason": reason, "due_at_us": due})


def remove_due_files(database: Database, store: TokenStore) -> int:
    """Remove the files whose grace is over and return their number. Repeated calls change nothing."""
    removed, size = 0, 0
    while removed < _FILES_PER_ROUND:
        with database.read() as session:
            due = _due(session, now_us(), _FILES_AT_ONCE)
        for each in due:
            store.remove(each.file)
        if due:
            database.write(partial(_forget, [each.file for each in due]))
        removed, size = removed + len(due), size + sum(each.file_bytes for each in due)
        if len(due) < _FILES_AT_ONCE:
            break
    if removed:
        _logger.info("removed %d files of %.1f MB whose rollouts were deleted or purged", removed, size / 1e6)
    return removed


def files_waiting(session: Session, names: Sequence[str]) -> set[str]:
    """Return those of these files that wait for their removal."""
    return set(session.scalars(select(FileRemoval.file).where(FileRemoval.file.in_(names))))


def _due(session: Session, before_us: int, limit: int) -> Sequence[FileRemoval]:
    query = select(FileRemoval).where(FileRemoval.due_at_us <= before_us)
    return session.scalars(query.order_by(FileRemoval.due_at_us).limit(limit)).all()


def _forget(files: Sequence[str], session: Session) -> None:
    session.execute(delete(FileRemoval).where(FileRemoval.file.in_(files)))
