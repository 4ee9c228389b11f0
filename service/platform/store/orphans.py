"""Files that no catalogue row names: what a crash leaves between publishing a file and committing its row.

An orphan is removed once it is older than the grace, unless a process of this machine has it in flight. The order makes
this safe: a mark is set before a file is published and cleared after its row is committed, and the sweep looks for the
mark before it reads the catalogue. So a file without a mark is either named by a row that the sweep sees, or no request
will ever name it, since each upload has a name of its own. The grace covers processes of other machines.

Files that retention or a deletion has given up wait for `removals.py`. Files with other names than the service makes
are never removed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from foreshock_service.platform.database.session import Database
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.catalogue import batches, files_in_catalogue
from foreshock_service.platform.store.names import parse_name
from foreshock_service.platform.store.removals import files_waiting
from foreshock_service.platform.store.tokens import ListedFile, TokenStore

_logger = logging.getLogger(__name__)
_FILES_AT_ONCE = 5_000
_LOCK = "foreshock orphan sweep"


def find_orphans(store: TokenStore, database: Database, grace_seconds: float) -> Iterator[ListedFile]:
    """Yield the files that no row names, older than the grace and not in flight."""
    for batch in batches(store.list_files(), _FILES_AT_ONCE):
        parsed = {}
        for file in batch:
            name = parse_name(file.name)
            if name is not None and file.age_seconds > grace_seconds and not store.is_in_flight(file.name):
                parsed[file.name] = name
        if parsed:
            # A new session for each batch: it must begin after the marks were looked for.
            with database.read() as session:
                named = files_in_catalogue(session, parsed)
                # After the catalogue: a transaction that gives a file up adds it here.
                named |= files_waiting(session, list(parsed))
            yield from (file for file in batch if file.name in parsed and file.name not in named)


def remove_orphans(
    store: TokenStore, database: Database, grace_seconds: float, go_on: Callable[[], bool] = lambda: True
) -> int:
    """Remove the orphans and return their number; ends early once `go_on` returns False."""
    removed, size = 0, 0
    for file in find_orphans(store, database, grace_seconds):
        if not go_on():
            break
        store.remove(file.name)
        removed, size = removed + 1, size + file.size
    if removed:
        _logger.info("removed %d files of %.1f MB that no catalogue row names", removed, size / 1e6)
    return removed


class OrphanSweep:
    """The periodic removal of orphans, in one process at a time: at the first call, then at intervals."""

    def __init__(self, store: TokenStore, database: Database, settings: Settings) -> None:
        self._store, self._database = store, database
        self._grace, self._interval = settings.orphan_grace_seconds, settings.orphan_sweep_seconds
        self._due = 0.0
        self._stopping = threading.Event()

    def run_if_due(self) -> int:
        """Remove the orphans if the interval is over and no other process does; return their number."""
        if time.monotonic() < self._due:
            return 0
        self._due = time.monotonic() + self._interval
        with self._database.exclusive(_LOCK) as held:
            if not held:
                return 0
            return remove_orphans(self._store, self._database, self._grace, lambda: not self._stopping.is_set())

    def stop(self) -> None:
        """End a removal that is under way after its current file."""
        self._stopping.set()
