"""Polls of the advice: wait for a change, then answer with what is read once for all who poll the run."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Response
from starlette.concurrency import run_in_threadpool

from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.etag import names_version
from foreshock_service.platform.keys.service import Scope
from foreshock_service.platform.security import Principal
from foreshock_service.runs.runs.service import check_visible
from foreshock_service.watch.advice import service
from foreshock_service.watch.long_polls.versions import RunVersion
from foreshock_service.watch.long_polls.waiters import LongPolls


@dataclass(frozen=True, slots=True)
class Poll:
    """One request for the advice of a run."""

    run: str
    step: int | None = None
    wait: float = 0.0
    follow: bool = False
    if_none_match: str | None = None


async def answer_poll(context: ServiceContext, polls: LongPolls, principal: Principal, poll: Poll) -> Response:
    """Return the advice, or 304; after a change if the poll waits for one. Raises RunNotFound and RunDeleted."""
    run, step = poll.run, poll.step
    with polls.waiter(run) as waiter:
        version = check_visible(await polls.version(run), principal, run)
        if poll.follow and step is not None and step > version.polled_step and principal.may(Scope.INGEST):
            await run_in_threadpool(_note_poll, context, principal, run, step)
        if poll.wait > 0 and names_version(poll.if_none_match, version.of_advice):

            def has_changed(now: RunVersion | None) -> bool:
                return now is None or now.deleted_at_us is not None or now.of_advice != version.of_advice

            await waiter.until(has_changed, poll.wait)
    snapshot = await polls.read(service.read_snapshot, run)
    check_visible(None if snapshot is None else snapshot.run, principal, run)
    assert snapshot is not None
    return snapshot.answer(step).response(poll.if_none_match)


def _note_poll(context: ServiceContext, principal: Principal, run: str, step: int) -> None:
    context.database.write(lambda session: service.note_poll(session, principal, run, step))
