"""HTTP: advice on the learning rate."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response, status
from starlette.concurrency import run_in_threadpool

from service.platform.context import Context, ServiceContext
from service.platform.etag import names_version
from service.platform.keys.service import Scope
from service.platform.pagination import Cursor, Limit, Page
from service.platform.schemas import LARGEST_STEP
from service.platform.security import Administrator, Ingester, Principal, Reader
from service.runs.runs.addresses import RunIdentifier
from service.runs.runs.service import check_visible
from service.watch.advice import service
from service.watch.advice.schemas import AcknowledgementCreate, AdviceRead, DecisionRead, OperatorDecisionCreate
from service.watch.long_polls.answers import NOT_MODIFIED
from service.watch.long_polls.turns import turn_of
from service.watch.long_polls.waiters import LongPollsOfApp

router = APIRouter(prefix="/v1/runs/{run}/lr-advice", tags=["advice"])


@router.get("", response_model=AdviceRead, responses=NOT_MODIFIED)
async def read_advice(
    run: RunIdentifier,
    context: Context,
    principal: Reader,
    polls: LongPollsOfApp,
    request: Request,
    step: Annotated[int | None, Query(ge=0, le=LARGEST_STEP, description="the step the trainer is about to do")] = None,
    wait: Annotated[
        float, Query(ge=0, le=30, description="seconds to wait for a change of the advice or the alerts")
    ] = 0.0,
    follow: Annotated[
        bool, Query(description="a trainer polls and applies the answer: later decisions do not change `step`")
    ] = False,
    if_none_match: Annotated[str | None, Header(max_length=1000)] = None,
) -> Response:
    """Return the whole state of the advice; 304 if the bytes are those of If-None-Match.

    With `wait` and If-None-Match the answer comes when the advice or an alert has changed since that answer. A step
    that closes is no such change: it is in the answer after `wait` seconds.
    """
    async with turn_of(request).given_away():
        with polls.waiter(run) as waiter:
            version = check_visible(await polls.version(run), principal, run)
            if follow and step is not None and step > version.polled_step and principal.may(Scope.INGEST):
                await run_in_threadpool(_note_poll, context, principal, run, step)
            if wait > 0 and names_version(if_none_match, version.of_advice):
                await waiter.until(
                    lambda now: now is None or now.deleted_at_us is not None or now.of_advice != version.of_advice, wait
                )
        snapshot = await polls.read(service.read_snapshot, run)
    check_visible(None if snapshot is None else snapshot.run, principal, run)
    assert snapshot is not None
    return snapshot.answer(step).response(if_none_match)


@router.post("/ack", status_code=status.HTTP_204_NO_CONTENT)
def acknowledge(run: RunIdentifier, body: AcknowledgementCreate, context: Context, principal: Ingester) -> None:
    """Report the learning rate used at a step; a repeated report overwrites the older one."""
    context.database.write(lambda session: service.acknowledge(session, principal, run, body))


@router.get("/decisions")
def list_decisions(
    run: RunIdentifier, context: Context, principal: Reader, cursor: Cursor = None, limit: Limit = 200
) -> Page[DecisionRead]:
    """Return a page of the append-only log of decisions, oldest first."""
    with context.database.read() as session:
        return service.list_decisions(session, principal, run, cursor, limit)


@router.post("/decisions", status_code=status.HTTP_201_CREATED)
def operate(run: RunIdentifier, body: OperatorDecisionCreate, context: Context, principal: Administrator) -> AdviceRead:
    """Hold, release, raise or halve as an operator; 409 if it changes nothing. The answer is the advice."""
    return context.database.write(lambda session: service.operate(session, principal, run, body))


def _note_poll(context: ServiceContext, principal: Principal, run: str, step: int) -> None:
    context.database.write(lambda session: service.note_poll(session, principal, run, step))
