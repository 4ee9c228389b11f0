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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Literal

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock_service.platform.database.engine import insert_if_absent
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import FileRemoval, Probe, ProbeJob, Run, ScoreFile, Shard
from foreshock_service.platform.store.tokens import ListedFile, TokenStore, parse_name

RemovalReason = Literal["retention", "deletion", "orphan"]
# The row of a taken orphan stays this long: no process is suspended longer between publishing a file and its commit.
_TAKEN_SECONDS = 7 * 86_400.0

_FILES_AT_ONCE = 200
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
    with database.read() as session:
        query = select(FileRemoval).where(FileRemoval.due_at_us <= now_us())
        due = session.scalars(query.order_by(FileRemoval.due_at_us, FileRemoval.file).limit(_FILES_PER_ROUND)).all()
    for start in range(0, len(due), _FILES_AT_ONCE):
        gone: list[FileRemoval] = []
        left: list[str] = []
        for each in due[start : start + _FILES_AT_ONCE]:
            if len(errors) == _FAILURES_PER_ROUND:
                break
            if _is_removed(store, each.file, errors):
                gone.append(each)
            else:
                left.append(each.file)
        if gone or left:
            database.write(partial(_settle, [each.file for each in gone], left))
        removed, size = removed + len(gone), size + sum(each.file_bytes for each in gone)
    return _report("of deleted runs and purged steps", removed, size, errors)


def _is_removed(store: TokenStore, name: str, errors: list[OSError]) -> bool:
    try:
        store.remove(name)
    except OSError as error:
        _logger.warning("%s cannot be removed: %s", name, error)
        errors.append(error)
        return False
    return True


def _report(which: str, removed: int, size: int, errors: Sequence[OSError]) -> int:
    """Log the removed files and return their number; raises the first error."""
    if removed:
        _logger.info("removed %d files of %.1f MB %s", removed, size / 1e6, which)
    if errors:
        raise errors[0]
    return removed


def _settle(gone: Sequence[str], left: Sequence[str], session: Session) -> None:
    """Forget the files that are gone; try those that are left later, after all others that are due."""
    session.execute(delete(FileRemoval).where(FileRemoval.file.in_(gone)))
    later = now_us() + int(_RETRY_SECONDS * 1e6)
    session.execute(update(FileRemoval).where(FileRemoval.file.in_(left)).values(due_at_us=later))


def find_orphans(store: TokenStore, database: Database, grace_seconds: float) -> Iterator[ListedFile]:
    """Yield the files that no row names, older than the grace. `take_orphan` decides if one may be removed."""
    files = (file for file in store.list_files() if file.age_seconds > grace_seconds and parse_name(file.name))
    # A store lists the files of a run one after the other.
    for run_id, of_run in groupby(files, key=lambda file: file.name.partition("/")[0]):
        listed = list(of_run)
        scores = select(ScoreFile.file).join(ProbeJob, ProbeJob.id == ScoreFile.job_id)
        with database.read() as session:
            named = set(session.scalars(select(Shard.file).where(Shard.run_id == run_id)))
            of_probes = scores.join(Probe, Probe.id == ProbeJob.probe_id).where(Probe.run_id == run_id)
            named.update(session.scalars(of_probes))
            # Read after the catalogue: a file that is given up meanwhile is found here.
            of_removals = select(FileRemoval.file).where(FileRemoval.file.startswith(f"{run_id}/", autoescape=True))
            named.update(session.scalars(of_removals))
        yield from (file for file in listed if file.name not in named)


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
        if take_orphan(database, file) and _is_removed(store, file.name, errors):
            removed, size = removed + 1, size + file.size
    return _report("that no catalogue row names", removed, size, errors)


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
        of_shard = select(Shard.file).where(Shard.run_id == name.run_id, Shard.attempt == name.attempt)
        of_job = select(ScoreFile.file).where(ScoreFile.job_id == name.job_id, ScoreFile.file == file.name)
        for query in (of_shard.where(Shard.step == name.step, Shard.file == file.name), of_job):
            if session.scalar(query.limit(1)) is not None:
                return False
        give_up_files(session, [(file.name, file.size)], "orphan", _TAKEN_SECONDS)
        return True

    return database.write(take)


def check_not_taken(session: Session, files: Sequence[str]) -> None:
    """Raise OSError if a sweep took one of these files. For the transaction that adds their rows, under its lock."""
    taken = session.scalar(select(FileRemoval.file).where(FileRemoval.file.in_(files)).limit(1))
    if taken is not None:
        raise OSError(errno.EIO, f"older than the grace of orphans before its row was committed: {taken}")
