"""Remove files that the catalogue has given up, and orphans, which no row names.

The transaction in which retention or the deletion of a run gives up a file adds a row to `file_removals`. The file is
removed after a grace period, so that a backup with an older database snapshot still finds it.

A crash between publishing a file and committing its row leaves an orphan, which is removed once it is older than the
grace period. The sweep first takes it: a transaction locks its run and job, checks that no row names the file, and
records it. A commit of a row for this file then has either finished, and the sweep sees the row; or it comes later,
finds the file taken, and fails. This holds in any process and for any grace. The client sends such an upload again.
Files with names that the service does not make are never removed.
"""

import errno
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Literal

from sqlalchemy import delete, select, tuple_, update
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock_service.platform.database.engine import insert_if_absent
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import FileRemoval, ProbeJob, Run, ScoreFile, Shard
from foreshock_service.platform.store.tokens import FileName, ListedFile, TokenStore, parse_name

RemovalReason = Literal["retention", "deletion", "orphan"]
# The row of a taken orphan stays this long: no process is suspended longer between publishing a file and its commit.
_TAKEN_SECONDS = 7 * 86_400.0

_FILES_AT_ONCE = 200
# SQLite allows 32,766 parameters of a statement.
_FILES_LISTED_AT_ONCE = 5_000
# In a round of the periodic task; the next round continues.
_FILES_PER_ROUND = 5_000
# A round ends after this many files that cannot be removed: a store that does not answer takes a minute for each.
_FAILURES_PER_ROUND = 20
_RETRY_SECONDS = 3_600.0
_logger = logging.getLogger(__name__)


def give_up_files(
    session: Session, files: Iterable[tuple[str, int]], reason: RemovalReason, grace_seconds: float
) -> None:
    """Schedule the removal of files, (name, bytes), after the grace. For the transaction that gives them up."""
    due = now_us() + int(grace_seconds * 1e6)
    for name, size in files:
        insert_if_absent(session, FileRemoval, {"file": name, "file_bytes": size, "reason": reason, "due_at_us": due})


def remove_due_files(database: Database, store: TokenStore) -> int:
    """Remove the files whose grace is over and return their number. Repeated calls change nothing.

    A file that cannot be removed is tried again after an hour. The others are removed; then the first error is raised.
    """
    removed, size, errors = 0, 0, list[OSError]()
    while removed < _FILES_PER_ROUND and len(errors) < _FAILURES_PER_ROUND:
        with database.read() as session:
            query = select(FileRemoval).where(FileRemoval.due_at_us <= now_us())
            due = session.scalars(query.order_by(FileRemoval.due_at_us).limit(_FILES_AT_ONCE)).all()
        gone: list[FileRemoval] = []
        left: list[str] = []
        for each in due:
            try:
                store.remove(each.file)
            except OSError as error:
                _logger.warning("%s cannot be removed: %s", each.file, error)
                errors.append(error)
                left.append(each.file)
                if len(errors) == _FAILURES_PER_ROUND:
                    break
            else:
                gone.append(each)
        if due:
            database.write(partial(_settle, [each.file for each in gone], left))
        removed, size = removed + len(gone), size + sum(each.file_bytes for each in gone)
        if len(due) < _FILES_AT_ONCE:
            break
    if removed:
        _logger.info("removed %d files of %.1f MB of deleted runs and purged steps", removed, size / 1e6)
    if errors:
        raise errors[0]
    return removed


def _waiting(session: Session, names: Sequence[str]) -> set[str]:
    """Return which of these files wait for their removal."""
    return set(session.scalars(select(FileRemoval.file).where(FileRemoval.file.in_(names))))


def _settle(gone: Sequence[str], left: Sequence[str], session: Session) -> None:
    """Forget the files that are gone; try those that are left later, after all others that are due."""
    session.execute(delete(FileRemoval).where(FileRemoval.file.in_(gone)))
    later = now_us() + int(_RETRY_SECONDS * 1e6)
    session.execute(update(FileRemoval).where(FileRemoval.file.in_(left)).values(due_at_us=later))


def find_orphans(store: TokenStore, database: Database, grace_seconds: float) -> Iterator[ListedFile]:
    """Yield the files that no row names, older than the grace. `take_orphan` decides if one may be removed."""
    files = store.list_files()
    while batch := list(islice(files, _FILES_LISTED_AT_ONCE)):
        parsed = {}
        for file in batch:
            name = parse_name(file.name)
            if name is not None and file.age_seconds > grace_seconds:
                parsed[file.name] = name
        if parsed:
            with database.read() as session:
                named = files_in_catalogue(session, parsed.values())
                # Read after the catalogue: a file that is given up meanwhile is found here.
                named |= _waiting(session, list(parsed))
            yield from (file for file in batch if file.name in parsed and file.name not in named)


def remove_orphans(
    store: TokenStore, database: Database, grace_seconds: float, go_on: Callable[[], bool] = lambda: True
) -> int:
    """Remove the orphans and return their number; ends early once `go_on` returns False.

    One that cannot be removed is left to `remove_due_files`. The others are removed; then the first error is raised.
    """
    removed, size, errors = 0, 0, list[OSError]()
    for file in find_orphans(store, database, grace_seconds):
        if not go_on() or len(errors) == _FAILURES_PER_ROUND:
            break
        if take_orphan(database, file):
            try:
                store.remove(file.name)
            except OSError as error:
                _logger.warning("the orphan %s cannot be removed: %s", file.name, error)
                errors.append(error)
            else:
                removed, size = removed + 1, size + file.size
    if removed:
        _logger.info("removed %d files of %.1f MB that no catalogue row names", removed, size / 1e6)
    if errors:
        raise errors[0]
    return removed


def take_orphan(database: Database, file: ListedFile) -> bool:
    """Take an orphan, so that no row can name it any more; False if a row names it. The caller removes the file."""
    name = parse_name(file.name)
    if name is None:
        return False

    def take(session: Session) -> bool:
        # Code that adds a row of the file holds one of these locks and calls `check_not_taken`.
        session.execute(select(Run.id).where(Run.id == name.run_id).with_for_update())
        if name.job_id is not None:
            session.execute(select(ProbeJob.id).where(ProbeJob.id == name.job_id).with_for_update())
        if file.name in files_in_catalogue(session, [name]):
            return False
        give_up_files(session, [(file.name, file.size)], "orphan", _TAKEN_SECONDS)
        return True

    return database.write(take)


def check_not_taken(session: Session, files: Sequence[str]) -> None:
    """Raise OSError if a sweep took one of these files. For the transaction that adds their rows, under its lock."""
    if taken := _waiting(session, files):
        raise OSError(errno.EIO, f"older than the grace of orphans before its row was committed: {min(taken)}")


def files_in_catalogue(session: Session, names: Iterable[FileName]) -> set[str]:
    """Return the files that the rows of these files' steps and jobs name; by primary key, since `file` has no index."""
    steps: dict[str, list[tuple[int, int]]] = defaultdict(list)
    jobs: set[str] = set()
    for name in names:
        if name.job_id is None:
            steps[name.run_id].append((name.attempt, name.step))
        else:
            jobs.add(name.job_id)
    found: set[str] = set()
    place = tuple_(Shard.attempt, Shard.step)
    for run_id, places in steps.items():
        query = select(Shard.file).where(Shard.run_id == run_id, place >= min(places), place <= max(places))
        found.update(session.scalars(query))
    found.update(session.scalars(select(ScoreFile.file).where(ScoreFile.job_id.in_(jobs))))
    return found
