"""Long polls of advice and alerts: they hold neither a thread nor a database connection while they wait.

Twice a second one query reads the versions of all runs that polls of this process wait for. A change by any process is
therefore seen within half a second, and its cost does not grow with the number of changes.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Any, cast

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


@dataclass(frozen=True, slots=True)
class RunVersion:
    """The versions whose change ends polls of a run: (attempt, revision) of the advice, and that of the alerts."""

    project: str
    deleted_at_us: int | None
    attempt: int
    revision: int
    alerts: int

    @property
    def of_advice(self) -> str:
        """Return the version that begins the entity tag of the advice."""
        return f"{self.attempt}-{self.revision}-{self.alerts}"

    @property
    def of_alerts(self) -> str:
        """Return the version that begins the entity tag of the alerts."""
        return str(self.alerts)


def read_versions(session: Session, run_ids: Collection[str]) -> dict[str, RunVersion]:
    """Return the version of each of these runs that exists, deleted ones included, in one query."""
    # The subquery reads only the end of a range of an index.
    alerts = select(func.max(Alert.version)).where(Alert.run_id == Run.id).scalar_subquery()
    advice = (FoldedAdvice.attempt, FoldedAdvice.revision)
    query = select(Run.id, Run.project, Run.deleted_at_us, *advice, alerts).where(Run.id.in_(run_ids))
    query = query.outerjoin(FoldedAdvice, FoldedAdvice.run_id == Run.id)
    # Before any decision the attempt is 1, as in `fold`.
    return {row[0]: RunVersion(row[1], row[2], row[3] or 1, row[4] or 0, row[5] or 0) for row in session.execute(query)}


class LongPolls:
    """The waiting polls of one process. Used by the coroutines of one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: defaultdict[str, set[_Waiter]] = defaultdict(set)
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
            for waiter in waiters:
                waiter.woken.set()

    async def stop(self) -> None:
        """End every wait and stop looking for changes."""
        self.release()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def wait(self, run_id: str, is_over: Callable[[RunVersion | None], bool], seconds: float) -> None:
        """Wait until the run's version satisfies `is_over`, the service stops, or `seconds` have passed."""
        if self._stopped:
            return
        waiter = _Waiter(is_over, asyncio.Event())
        self._waiting[run_id].add(waiter)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await waiter.woken.wait()
        finally:
            self._waiting[run_id].discard(waiter)
            if not self._waiting[run_id]:
                del self._waiting[run_id]

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
                for waiter in self._waiting.get(run_id, ()):
                    if waiter.is_over(versions.get(run_id)):
                        waiter.woken.set()

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

        The periodic look checks both; a poll reads nothing itself before it waits.
        """
        if seconds <= 0 or if_none_match is None:
            return
        known: str | None = None

        def is_over(now: RunVersion | None) -> bool:
            nonlocal known
            if now is None or now.deleted_at_us is not None or not principal.sees(now.project):
                return True
            if known is None and compression.names_version(if_none_match, part(now)):
                known = part(now)
            return part(now) != known

        await self.wait(run_id, is_over, seconds)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    is_over: Callable[[RunVersion | None], bool]
    woken: asyncio.Event


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
