"""The notary: what the trainer announced and what each engine holds after a weight sync, with a verdict on each engine.

An engine's report is judged as soon as the trainer's announcement of the step is there too, in either order. The number
of engines that hold other weights is a scalar of the step, which a rule watches; the sentences are a finding. Unlike
results of probes, reports belong to no job of a worker.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import Request, status
from sqlalchemy import select, tuple_, update
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from foreshock.api.records import parse, to_json
from foreshock.api.runs import WeightsRecord
from foreshock.clock import now_us
from foreshock.diagnosis.weights import ENGINES_OFF, TITLE, WEIGHTS_DIFFER, WHAT_TO_DO, verdict_in_words
from foreshock.notary.compare import Holding, Verdict, judge
from foreshock.notary.pieces import Piece, Tensors
from foreshock_service.platform import pagination, parameters, security, uploads
from foreshock_service.platform.context import Context, EventBus, ServiceContext
from foreshock_service.platform.database.engine import upsert
from foreshock_service.platform.database.tables import WeightsReport
from foreshock_service.runs import attempts, findings, run_endpoints, runs, scalars, weights_reports
from foreshock_service.runs.events import FindingsChanged, StepKey

router = parameters.api_router(prefix="/v1/runs/{run}", tags=["weights"])

KEPT_STEPS = 64
"""Newest steps whose digests are kept, besides the run's first step. A tensor that an engine kept from an older step is
identified by the engine's previous verdict."""
MOST_BYTES = 64 << 20
"""Of a report, which is a table of up to `foreshock.notary.reports.MOST_PIECES` rows."""
FINDING_STEPS = 200

_TRAINER, _VARIANT, _ENGINE = "trainer", "variant:", "engine:"


@router.put("/steps/{step}/weights", status_code=status.HTTP_204_NO_CONTENT, openapi_extra=uploads.PARQUET_BODY)
async def put_weights(
    run: run_endpoints.RunIdentifier,
    step: parameters.StepPath,
    request: Request,
    context: Context,
    principal: security.Ingester,
    attempt: parameters.AttemptQuery = 1,
) -> None:
    """Store what trainer and engines hold after the sync of the weights that sample a step. Idempotent.

    The body is made by `foreshock.notary.reports`. Trainer and engines may report at different times.
    """
    key = StepKey(run, attempt, step)
    # Checked before the body, so that a refused report is not received.
    await run_in_threadpool(_check_attempt, context, principal, key)
    most_bytes = min(MOST_BYTES, context.settings.max_body_bytes)
    async with uploads.received_upload(request, context.uploads, context.store, most_bytes) as upload:
        await context.uploads.run(_ingest, context, principal, key, upload)


def _check_attempt(context: ServiceContext, principal: security.Principal, key: StepKey) -> None:
    with context.database.read() as session:
        runs.get_run(session, principal, key.run_id)
        attempts.check_attempt(session, key.run_id, key.attempt)


def _ingest(context: ServiceContext, principal: security.Principal, key: StepKey, upload: uploads.Upload) -> None:
    report = context.decoders.run(weights_reports.decode, upload.path)
    context.database.write(lambda session: store_weights(session, context.events, principal, key, report))


@router.get("/weights")
def list_weights(
    run: run_endpoints.RunIdentifier,
    context: Context,
    principal: security.Reader,
    cursor: pagination.Cursor = None,
    limit: pagination.Limit = 200,
) -> pagination.Page[WeightsRecord]:
    """List what each engine held after each weight sync, as the notary found it, by step and engine."""
    with context.database.read() as session:
        runs.get_run(session, principal, run)
        after = pagination.decode_cursor(cursor, (int, int, str)) if cursor is not None else (-1, -1, "")
        table = WeightsReport
        position = (table.step, table.attempt, table.holder)
        judged = (table.run_id == run, table.verdict.is_not(None), tuple_(*position) > after)
        rows = session.scalars(select(table).where(*judged).order_by(*position).limit(limit + 1))
        found = [_record(row) for row in rows]
    return pagination.page_of(found, limit, lambda row: (row.step, row.attempt, f"{_ENGINE}{row.engine}"))


def store_weights(
    session: Session,
    events: EventBus,
    principal: security.Principal,
    key: StepKey,
    report: weights_reports.Report,
) -> None:
    """Store reports of a step and judge the engines that have one."""
    runs.lock_run(session, principal, key.run_id)
    attempts.check_attempt(session, key.run_id, key.attempt)
    common = {**key._asdict(), "engines": report.engines_in_all, "verdict": None, "received_at_us": now_us()}
    rows = [common | {"holder": holder, "report": said} for holder, said in report.holders.items()]
    of_step = _rows_of_step(session, key)
    was_wrong = {row.holder for row in of_step if row.verdict is not None and not _verdict(row).is_right}
    upsert(session, WeightsReport, rows, ("run_id", "step", "attempt", "holder"))
    session.expire_all()
    _judge_step(session, events, principal, key, bool(was_wrong))


def weights_of_newest_steps(session: Session, run_id: str, steps: int) -> list[WeightsRecord]:
    """Return what the engines held after the newest syncs of active steps, by step and engine."""
    table = WeightsReport
    judged = (table.run_id == run_id, attempts.active_rows(session, run_id, table), table.verdict.is_not(None))
    newest = select(table.step).where(*judged).distinct().order_by(table.step.desc()).limit(steps)
    rows = session.scalars(select(table).where(*judged, table.step.in_(newest)).order_by(table.step, table.holder))
    return [_record(row) for row in rows]


def checksums_of_step(session: Session, key: StepKey) -> tuple[str, ...]:
    """Return a sentence for each engine about what it held after the weight sync of a step."""
    return tuple(_record(row).sentence for row in _rows_of_step(session, key) if row.verdict is not None)


def findings_of_run(session: Session, run_id: str) -> Sequence[findings.FindingOfSteps]:
    """Return the finding of engines that hold other weights, over the newest active steps."""
    by_step: dict[int, list[WeightsRecord]] = {}
    for record in weights_of_newest_steps(session, run_id, FINDING_STEPS):
        by_step.setdefault(record.step, []).append(record)
    return findings.newest_of_steps((step, _findings(by_step[step])) for step in sorted(by_step, reverse=True))


def _judge_step(
    session: Session, events: EventBus, principal: security.Principal, key: StepKey, was_wrong: bool
) -> None:
    rows = _rows_of_step(session, key)
    trainer = next((row for row in rows if row.holder == _TRAINER), None)
    engines = [row for row in rows if row.holder.startswith(_ENGINE)]
    if trainer is None or trainer.report is None or not engines:
        return
    variants = {
        row.holder.removeprefix(_VARIANT): _holding(row.report).tensors
        for row in rows
        if row.holder.startswith(_VARIANT) and row.report is not None
    }
    announced = _holding(trainer.report)
    history: dict[int, Holding] = {}
    for row in engines:
        if row.report is None:
            continue
        held = _holding(row.report)
        if row.report["others_as_announced"]:
            held = Holding({**announced.tensors, **held.tensors}, held.canary)
        verdict = judge(key.step, {key.step: announced}, held)
        if verdict is not None and (held.canary or not verdict.is_right):
            history = history or dict(_announcements(session, key))
            verdict = judge(key.step, history, held, _verdict_before(session, row), variants)
        row.verdict = None if verdict is None else to_json(verdict)
    session.flush()
    records = [_record(row) for row in engines if row.verdict is not None]
    off = [each for each in records if not each.verdict.is_right]
    values: dict[str, float | None] = {ENGINES_OFF: float(len(off)), "notary/engines": float(len(records))}
    scalars.store_scalars(session, events, principal, key, scalars.ScalarsPut(source="notary", values=values))
    before = {WEIGHTS_DIFFER: "critical"} if was_wrong else {}
    findings.add_step(session, key, "notary", before, _findings(records))
    if off or was_wrong:
        events.publish(session, FindingsChanged(key.run_id))
    # Old reports are cleared; that of the first step stays.
    table = WeightsReport
    first = select(table.step).where(table.run_id == key.run_id).order_by(table.step).limit(1).scalar_subquery()
    old = (table.run_id == key.run_id, table.step < key.step - KEPT_STEPS, table.step > first)
    session.execute(update(table).where(*old, table.report.is_not(None)).values(report=None))


def _findings(records: Sequence[WeightsRecord]) -> list[findings.FindingOfStep]:
    sentences = [each.sentence for each in records if not each.verdict.is_right]
    if not sentences:
        return []
    return [findings.FindingOfStep(WEIGHTS_DIFFER, "critical", TITLE, " ".join(sentences), WHAT_TO_DO)]


def _rows_of_step(session: Session, key: StepKey) -> list[WeightsReport]:
    query = select(WeightsReport).filter_by(**key._asdict()).order_by(WeightsReport.holder)
    return list(session.scalars(query))


def _announcements(session: Session, key: StepKey) -> Iterator[tuple[int, Holding]]:
    """Yield the active announcements up to a step that are kept."""
    table = WeightsReport
    active = attempts.active_rows(session, key.run_id, table)
    kept = (table.run_id == key.run_id, table.holder == _TRAINER, table.report.is_not(None), table.step <= key.step)
    for row in session.scalars(select(table).where(active, *kept).order_by(table.step.desc()).limit(KEPT_STEPS + 2)):
        yield row.step, _holding(row.report or {})


def _verdict_before(session: Session, row: WeightsReport) -> Verdict | None:
    table = WeightsReport
    of_engine = (table.run_id == row.run_id, table.holder == row.holder, table.verdict.is_not(None))
    query = select(table).where(*of_engine, table.step < row.step).order_by(table.step.desc(), table.attempt.desc())
    before = session.scalars(query.limit(1)).first()
    return None if before is None else _verdict(before)


def _holding(report: Mapping[str, Any]) -> Holding:
    tensors: Tensors = {
        name: [Piece(dtype, int(digest, 16), *place) for dtype, digest, *place in pieces]
        for name, pieces in report["tensors"].items()
    }
    return Holding(tensors, report["canary"])


def _verdict(row: WeightsReport) -> Verdict:
    return parse(Verdict, row.verdict or {})


def _record(row: WeightsReport) -> WeightsRecord:
    engine, verdict = row.holder.removeprefix(_ENGINE), _verdict(row)
    return WeightsRecord(
        step=row.step,
        attempt=row.attempt,
        engine=engine,
        is_right=verdict.is_right,
        sentence=verdict_in_words(engine, row.engines or 1, verdict),
        verdict=verdict,
    )
