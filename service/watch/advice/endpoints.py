"""HTTP: advice on the learning rate."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response, status

from foreshock_service.platform.context import Context
from foreshock_service.platform.pagination import Cursor, Limit, Page
from foreshock_service.platform.schemas import LARGEST_STEP
from foreshock_service.platform.security import Administrator, Ingester, Reader
from foreshock_service.runs.runs.addresses import RunIdentifier
from foreshock_service.watch.advice import service
from foreshock_service.watch.advice.polling import Poll, answer_poll
from foreshock_service.watch.advice.schemas import (
    AcknowledgementCreate,
    AdviceRead,
    DecisionRead,
    OperatorDecisionCreate,
)
from foreshock_service.watch.long_polls.answers import NOT_MODIFIED
from foreshock_service.watch.long_polls.turns import turn_of
from foreshock_service.watch.long_polls.waiters import LONGEST_WAIT_SECONDS, LongPollsOfApp

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
        float,
        Query(ge=0, le=LONGEST_WAIT_SECONDS, description="seconds to wait for a change of the advice or the alerts"),
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
    # `poll_route.py` takes most polls before this route, with the same answers.
    async with turn_of(request).given_away():
        return await answer_poll(context, polls, principal, Poll(run, step, wait, follow, if_none_match))


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
