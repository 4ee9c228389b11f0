"""HTTP: advice on the learning rate."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response, status
from starlette.concurrency import run_in_threadpool

from service.platform.context import Context, ServiceContext
from service.platform.etag import matches
from service.platform.keys.service import Scope
from service.platform.pagination import Cursor, Limit, Page
from service.platform.schemas import LARGEST_STEP
from service.platform.security import Administrator, Ingester, Principal, Reader
from service.runs.runs.addresses import RunIdentifier
from service.watch.advice import service
from service.watch.advice.schemas import AcknowledgementCreate, AdviceRead, DecisionRead, OperatorDecisionCreate
from service.watch.advice.service import Answer
from service.watch.long_poll import wait_for_change

router = APIRouter(prefix="/v1/runs/{run}/lr-advice", tags=["advice"])

_NOT_MODIFIED: dict[int | str, dict[str, Any]] = {
    304: {"description": "No change of If-None-Match within `wait` seconds"}
}


@router.get("", response_model=AdviceRead, responses=_NOT_MODIFIED)
async def read_advice(
    run: RunIdentifier,
    context: Context,
    principal: Reader,
    response: Response,
    step: Annotated[int | None, Query(ge=0, le=LARGEST_STEP, description="the step the trainer is about to do")] = None,
    wait: Annotated[float, Query(ge=0, le=30, description="seconds to wait for a change of If-None-Match")] = 0.0,
    follow: Annotated[
        bool, Query(description="a trainer polls and applies the answer: later decisions do not change `step`")
    ] = False,
    if_none_match: Annotated[str | None, Header(max_length=1000)] = None,
) -> Response | AdviceRead:
    """Return the whole state of the advice. With If-None-Match: 304 if it is still the same after `wait` seconds."""
    if follow and step is not None and principal.may(Scope.INGEST):
        await run_in_threadpool(_note_poll, context, principal, run, step)
    if wait > 0 and if_none_match is not None:
        await wait_for_change(lambda: _etag(context, principal, run), run, if_none_match, wait)
    answer = await run_in_threadpool(_read, context, principal, run, step)
    headers = {"ETag": answer.etag, "Cache-Control": "no-cache"}
    if matches(if_none_match, answer.etag):
        return Response(status_code=status.HTTP_304_NOT_MODIFIED, headers=headers)
    response.headers.update(headers)
    return answer.advice


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


def _read(context: ServiceContext, principal: Principal, run: str, step: int | None) -> Answer:
    with context.database.read() as session:
        return service.read_advice(session, principal, run, step)


def _etag(context: ServiceContext, principal: Principal, run: str) -> str:
    with context.database.read() as session:
        return service.read_etag(session, principal, run)


def _note_poll(context: ServiceContext, principal: Principal, run: str, step: int) -> None:
    with context.database.read() as session:
        if not service.is_news(session, run, step):
            return
    context.database.write(lambda session: service.note_poll(session, principal, run, step))
