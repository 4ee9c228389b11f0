"""Long polls of advice and alerts: they hold neither a thread nor a database connection while they wait.

Twice a second one query reads the versions of all runs that polls of this process wait for. A change by any process is
therefore seen within half a second, and its cost does not grow with the number of changes.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Annotated, Any, NamedTuple, cast

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Request, Response, status
from pydantic import BaseModel
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from foreshock_service.platform import compression, security
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Alert, FoldedAdvice, Run

LONGEST_WAIT_SECONDS = 30
LOOK_SECONDS = 0.5

NOT_MODIFIED: dict[int | str, dict[str, Any]] = {
    304: {"description": "The answer is still the one that If-None-Match names, after `wait` seconds"}
}
_logger = logging.getLogger(__name__)
_IsOver = Callable[["RunVersion | None"], bool]


class RunVersion(NamedTuple):
    """The versions whose change ends polls of a run, each as the entity tag of its answers begins."""

    project: str
    deleted_at_us: int | None
    advice: str
    """(attempt, revision) of the advice, and the version of the alerts."""
    alerts: str


def read_versions(session: Session, run_ids: Collection[str]) -> dict[str, RunVersion]:
    """Return the version of each of these runs that exists, deleted ones included, in one query."""
    # The subquery reads only the end of a range of an index.
    newest = select(func.max(Alert.version)).where(Alert.run_id == Run.id).scalar_subquery()
    columns = (Run.id, Run.project, Run.deleted_at_us, FoldedAdvice.attempt, FoldedAdvice.revision, newest)
    query = select(*columns).outerjoin(FoldedAdvice, FoldedAdvice.run_id == Run.id).where(Run.id.in_(run_ids))
    # Before any decision the attempt is 1, as in `fold`.
    return {
        run_id: RunVersion(project, deleted_at_us, f"{attempt or 1}-{revision or 0}-{alerts or 0}", str(alerts or 0))
        for run_id, project, deleted_at_us, attempt, revision, alerts in session.execute(query)
    }


class LongPolls:
    """The waiting polls of one process. Used by the coroutines of one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: defaultdict[str, dict[asyncio.Event, _IsOver]] = defaultdict(dict)
        self._stopped = False
        self._task: asyncio.Task[None] | None = None
        # A thread of its own, so that a look never waits for the threads of requests.
        self._thread = CapacityLimiter(1)

    def count(self) -> int:
        """Return the number of waiting polls."""
        return sum(map(len, self._waiting.values()))

    def start(self) -> None:
        """Start to look for changes."""
        self._task = asyncio.create_task(self._look_again_and_again())

    def release(self) -> None:
        """End every present and future wait, because the service stops."""
        self._stopped = True
        for waiters in self._waiting.values():
            for woken in waiters:
                woken.set()

    async def stop(self) -> None:
        """End every wait and stop looking for changes."""
        self.release()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            run_ids = list(self._waiting)
            if not run_ids:
                continue
            try:
                versions = await to_thread.run_sync(self._read, run_ids, limiter=self._thread, abandon_on_cancel=True)
            except Exception:
                _logger.exception("the versions of runs cannot be read; they are read again")
                continue
            for run_id in run_ids:
                for woken, is_over in self._waiting.get(run_id, {}).items():
                    if is_over(versions.get(run_id)):
                        woken.set()

    def _read(self, run_ids: Collection[str]) -> dict[str, RunVersion]:
        with self._database.read() as session:
            return read_versions(session, run_ids)

    async def until_changed(
        self,
        principal: security.Principal,
        run_id: str,
        part: Callable[[RunVersion], str],
        if_none_match: str | None,
        seconds: float,
    ) -> None:
        """Wait until `if_none_match` does not name this part of the run's version, or the principal cannot see the run.

        At most so many seconds, and until the service stops. The periodic look checks both; a poll reads nothing itself
        before it waits.
        """
        if seconds <= 0 or if_none_match is None or self._stopped:
            return
        known: str | None = None

        def is_over(now: RunVersion | None) -> bool:
            nonlocal known
            if now is None or now.deleted_at_us is not None or not principal.sees(now.project):
                return True
            if known is None and compression.names_version(if_none_match, part(now)):
                known = part(now)
            return part(now) != known

        woken = asyncio.Event()
        self._waiting[run_id][woken] = is_over
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await woken.wait()
        finally:
            del self._waiting[run_id][woken]
            if not self._waiting[run_id]:
                del self._waiting[run_id]


def tagged_response(version: str, model: BaseModel, if_none_match: str | None) -> Response:
    """Return the model as JSON under an entity tag that begins with its version; 304 if the client has these bytes."""
    body = model.model_dump_json().encode()
    headers = {"ETag": compression.etag_of(version, body), "Cache-Control": "no-cache"}
    if compression.matches(if_none_match, headers["ETag"]):
        return Response(status_code=status.HTTP_304_NOT_MODIFIED, headers=headers)
    return Response(body, media_type="application/json", headers=headers)


async def _long_polls_of(request: Request) -> LongPolls:
    return cast(LongPolls, request.app.state.long_polls)


LongPollsOfApp = Annotated[LongPolls, Depends(_long_polls_of)]
