"""HTTP: advice on the learning rate, and on all levers."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Body, Depends, Header, Query, Response, status
from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock.api.records import from_attributes, parse
from foreshock.api.watch import DecisionRecord
from foreshock.clock import now_us
from foreshock.learning_rate.decisions import Decision
from foreshock_service.platform import pagination, parameters, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database import engine, tables
from foreshock_service.runs import runs
from foreshock_service.runs.runs import RunIdentifier, RunToRead
from foreshock_service.watch import long_polls
from foreshock_service.watch.advice import schemas, service

router = parameters.api_router(prefix="/v1/runs/{run}", tags=["advice"])
AskedStep = Annotated[
    int | None, Query(ge=0, le=parameters.LARGEST_STEP, description="the step the trainer is about to do")
]
Wait = Annotated[
    float,
    Query(
        ge=0,
        le=long_polls.LONGEST_WAIT_SECONDS,
        description="seconds to wait for a change of the advice or the alerts",
    ),
]
LeverAcknowledgement = Annotated[schemas.LeverAcknowledgementCreate, Body(discriminator="lever")]
Read = Callable[[Callable[[service.Snapshot, int | None], BaseModel]], Response]
_NOT_COUNTED: dict[int | str, dict[str, Any]] = {
    200: {"model": schemas.ReportNotCounted, "description": "It is of another attempt than the newest one"}
}


async def _changed(
    asked: RunToRead,
    polls: long_polls.LongPollsOfApp,
    step: AskedStep = None,
    wait: Wait = 0.0,
    if_none_match: Annotated[str | None, Header(max_length=1000)] = None,
) -> Read:
    """Wait for a change if the request asks for it; return the function that answers."""
    await polls.until_changed(asked.principal, asked.run, lambda version: version.advice, if_none_match, wait)

    def read(answer_of: Callable[[service.Snapshot, int | None], BaseModel]) -> Response:
        with asked.context.database.read() as session:
            found = service.read_snapshot(session, asked.principal, asked.run)
            return long_polls.tagged_response(found.version, answer_of(found, step), if_none_match)

    return read


@router.get("/advice", response_model=schemas.AdviceOfLeversRead, responses=long_polls.NOT_MODIFIED)
def read_advice_of_levers(read: Annotated[Read, Depends(_changed)]) -> Response:
    """Return the advice of the rate, the correction and the rollback; `wait` and If-None-Match as for `lr-advice`."""
    return read(service.Snapshot.of_all_levers)


@router.get("/lr-advice", response_model=schemas.AdviceRead, responses=long_polls.NOT_MODIFIED)
def read_advice(read: Annotated[Read, Depends(_changed)]) -> Response:
    """Return the whole state of the advice; 304 if the bytes are those of If-None-Match.

    With `wait` and If-None-Match the answer comes when the advice or an alert has changed since that answer. A step
    that closes is no such change: it is in the answer after `wait` seconds.
    """
    return read(service.Snapshot.advice)


@router.post("/advice/ack", status_code=status.HTTP_204_NO_CONTENT, responses=_NOT_COUNTED)
def acknowledge_lever(
    run: RunIdentifier, body: LeverAcknowledgement, context: Context, principal: security.Ingester
) -> Response:
    """Report what was done with a lever beside the rate at a step, or why it is refused; as `lr-advice/ack`."""
    table = tables.LeverAcknowledgement

    def report(session: Session) -> schemas.ReportNotCounted | None:
        newest, attempt = service.reporting(session, principal, run, body)
        known = session.get(table, (run, attempt, body.lever))
        if known is None or known.step <= body.step:
            done = None if body.done is None else dataclasses.asdict(body.done)
            of_body = {name: getattr(body, name) for name in ("lever", "step", "revision", "refused")}
            row = {"run_id": run, "attempt": attempt, **of_body, "done": done, "received_at_us": now_us()}
            engine.upsert(session, table, [row], ("run_id", "attempt", "lever"))
        return service.not_counted(session, run, attempt, newest)

    return _counted(context.database.write(report))


@router.post("/advice/decisions", status_code=status.HTTP_201_CREATED)
def operate_lever(
    run: RunIdentifier, body: schemas.OperatorDecisionCreate, context: Context, principal: security.Administrator
) -> schemas.AdviceOfLeversRead:
    """Hold, release or set a lever as an operator; 409 if it changes nothing. The answer is the advice."""
    return context.database.write(lambda session: service.operate(session, principal, run, body))


@router.post("/lr-advice/follow", status_code=status.HTTP_204_NO_CONTENT, responses=_NOT_COUNTED)
def follow_advice(
    run: RunIdentifier, body: schemas.FollowedStep, context: Context, principal: security.Ingester
) -> Response:
    """Report the step that a trainer does with the advice: later decisions do not change steps up to it.

    A step of another attempt than the newest one counts for nothing.
    """
    table = tables.TrainerProgress

    def report(session: Session) -> schemas.ReportNotCounted | None:
        runs.lock_run(session, principal, run)
        newest, _ = service.newest_version(session, run)
        refused = service.not_counted(session, run, body.attempt, newest)
        polled = session.scalar(select(table.polled_step).filter_by(run_id=run, attempt=newest))
        if refused is None and (polled is None or body.step > polled):
            row = {"run_id": run, "attempt": newest, "polled_step": body.step}
            engine.upsert(session, table, [row], ("run_id", "attempt"))
        return refused

    return _counted(context.database.write(report))


@router.post("/lr-advice/ack", status_code=status.HTTP_204_NO_CONTENT, responses=_NOT_COUNTED)
def acknowledge(
    run: RunIdentifier, body: schemas.AcknowledgementCreate, context: Context, principal: security.Ingester
) -> Response:
    """Report the learning rate used at a step; a repeated report overwrites the older one.

    That of an older attempt is kept with the attempt, and changes no advice.
    """

    def report(session: Session) -> schemas.ReportNotCounted | None:
        newest, attempt = service.reporting(session, principal, run, body)
        row = {
            "run_id": run,
            "attempt": attempt,
            "step": body.step,
            "revision": body.revision,
            "applied_learning_rate": body.applied_lr,
            "applied_scale": body.applied_scale,
            "received_at_us": now_us(),
        }
        engine.upsert(session, tables.AdviceAcknowledgement, [row], ("run_id", "attempt", "step"))
        return service.not_counted(session, run, attempt, newest)

    return _counted(context.database.write(report))


def _counted(refused: schemas.ReportNotCounted | None) -> Response:
    if refused is None:
        return Response(status_code=status.HTTP_204_NO_CONTENT)
    # Not an error: the client may rightly send reports that an earlier attempt left in its spool.
    return Response(refused.model_dump_json(), media_type="application/json")


@router.get("/lr-advice/decisions")
def list_decisions(
    asked: RunToRead, cursor: pagination.Cursor = None, limit: pagination.Limit = 200
) -> pagination.Page[DecisionRecord]:
    """Return a page of the append-only log of decisions, oldest first."""
    table = tables.AdviceDecision
    with asked.reading() as session:
        return pagination.page_of_query(
            session, select(table).where(table.run_id == asked.run), (table.revision,), cursor, limit,
            lambda rows: [_decision_record(row) for (row,) in rows], rising=True,
        )  # fmt: skip


def _decision_record(row: tables.AdviceDecision) -> DecisionRecord:
    made = parse(Decision, row.decision)
    value: Any = made.scale if made.kind == "loop" else made.value
    return from_attributes(DecisionRecord, row, lever=made.lever, value=value)
