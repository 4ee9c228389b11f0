"""The notary: what the trainer announced and what each engine holds after a weight sync, with a verdict on each engine.

An engine's report is judged as soon as the trainer's announcement of the step is there too, in either order. The number
of engines that hold other weights is a scalar of the step, which a rule watches; the sentences are a finding. Unlike
results of probes, reports belong to no job of a worker.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fastapi import Request, status
from sqlalchemy import select, update
from sqlalchemy.orm import Session, defer
from starlette.concurrency import run_in_threadpool

from foreshock.api.records import parse
from foreshock.api.runs import WeightsRecord
from foreshock.clock import now_us
from foreshock.diagnosis.weights import ENGINES_OFF, TITLE, WEIGHTS_DIFFER, WHAT_TO_DO, verdict_in_words
from foreshock.notary.compare import Verdict
from foreshock_service.platform import pagination, parameters, security, uploads
from foreshock_service.platform.context import Context, EventBus, ServiceContext
from foreshock_service.platform.database.engine import upsert
from foreshock_service.platform.database.tables import WeightsReport
from foreshock_service.runs import attempts, due, findings, runs, scalars, weights_reports
from foreshock_service.runs.events import StepKey

router = parameters.api_router(prefix="/v1/runs/{run}", tags=["weights"])

KEPT_STEPS = 64
"""Newest steps whose digests are kept, besides the run's first step. A tensor that an engine kept from an older step is
identified by the engine's previous verdict."""
MOST_BYTES = 64 << 20
"""Largest report in bytes: a table of up to `foreshock.notary.reports.MOST_PIECES` rows."""
FINDING_STEPS = 200

_MOST_HISTORY_BYTES = 16 << 20
"""Most bytes of compressed announcements searched for a wrong tensor: 64 of a dense model, 6 of one with 100,000
tensors."""
_TRAINER, _VARIANT, _ENGINE = "trainer", "variant:", "engine:"


@router.put("/steps/{step}/weights", status_code=status.HTTP_204_NO_CONTENT, openapi_extra=uploads.PARQUET_BODY)
async def put_weights(
    run: runs.RunIdentifier,
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
    """Store the reports and judge the engines of the step: outside the writer, as it may take seconds."""
    report = context.decoders.run(weights_reports.decode, upload.path)

    def store(session: Session) -> None:
        # The verdicts on earlier reports stay until the engines are judged again.
        runs.lock_run(session, principal, key.run_id)
        attempts.check_attempt(session, key.run_id, key.attempt)
        common = {**key._asdict(), "engines": report.engines_in_all, "received_at_us": now_us()}
        rows = [common | {"holder": holder, "report": said} for holder, said in report.holders.items()]
        upsert(session, WeightsReport, rows, ("run_id", "step", "attempt", "holder"))

    context.database.write(store)
    with context.database.read() as session:
        inputs = _inputs(session, key)
    if inputs is not None:
        judged = _judge(context, key, inputs)
        context.database.write(lambda session: _store_verdicts(session, context.events, key, inputs.stamp, judged))


@router.get("/weights")
def list_weights(
    asked: runs.RunToRead, cursor: pagination.Cursor = None, limit: pagination.Limit = 200
) -> pagination.Page[WeightsRecord]:
    """List what each engine held after each weight sync, as the notary found it, by step and engine."""
    table = WeightsReport
    judged = select(table).options(defer(table.report)).where(table.run_id == asked.run, table.verdict.is_not(None))
    with asked.reading() as session:
        return pagination.page_of_query(
            session, judged, (table.step, table.attempt, table.holder), cursor, limit,
            lambda rows: [_record(row) for (row,) in rows], rising=True,
        )  # fmt: skip


Stamp = frozenset[tuple[str, int]]
"""(holder, time of its report): equal for two reads of a step unless a report arrived meanwhile."""


class _Inputs(NamedTuple):
    stamp: Stamp
    announced: bytes
    engines: dict[str, weights_reports.Engine]
    variants: dict[str, bytes]


def _inputs(session: Session, key: StepKey) -> _Inputs | None:
    """Return the inputs of a judgement; None unless trainer and engines have reported."""
    rows = {row.holder: row for row in _rows_of_step(session, key)}
    trainer = rows.get(_TRAINER)
    engines = {
        holder.removeprefix(_ENGINE): weights_reports.Engine(row.report, _verdict_before(session, row))
        for holder, row in rows.items()
        if holder.startswith(_ENGINE) and row.report is not None
    }
    if trainer is None or trainer.report is None or not engines:
        return None
    variants = {
        holder.removeprefix(_VARIANT): row.report
        for holder, row in rows.items()
        if holder.startswith(_VARIANT) and row.report is not None
    }
    stamp = frozenset((holder, row.received_at_us) for holder, row in rows.items())
    return _Inputs(stamp, trainer.report, engines, variants)


def _judge(context: ServiceContext, key: StepKey, inputs: _Inputs) -> dict[str, weights_reports.Judged]:
    """Judge the engines in a decoder; earlier announcements are read only for those that they may explain."""
    judge, run = weights_reports.judge_engines, context.decoders.run
    judged = run(judge, key.step, inputs.announced, inputs.engines, {}, {})
    unexplained = {name: inputs.engines[name] for name, each in judged.items() if each.needs_history}
    if unexplained:
        with context.database.read() as session:
            history = dict(_announcements(session, key))
        judged |= run(judge, key.step, inputs.announced, unexplained, history, inputs.variants)
    return judged


def _store_verdicts(
    session: Session, events: EventBus, key: StepKey, stamp: Stamp, judged: Mapping[str, weights_reports.Judged]
) -> None:
    """Store the verdicts on the engines of a step, and how many hold other weights, as scalars.

    Stores nothing if a report arrived since they were read: its request judges them again.
    """
    runs.lock_run(session, security.UNRESTRICTED, key.run_id)
    table = WeightsReport
    query = select(table.holder, table.received_at_us).filter_by(**key._asdict())
    if {(holder, at_us) for holder, at_us in session.execute(query)} != stamp:
        return
    of_step = [getattr(table, name) == value for name, value in key._asdict().items()]
    was_wrong = session.scalar(select(table.holder).where(*of_step, table.is_right.is_(False)).limit(1)) is not None
    for name, each in judged.items():
        verdict = {"verdict": each.verdict, "is_right": each.is_right}
        session.execute(update(table).where(*of_step, table.holder == f"{_ENGINE}{name}").values(verdict))
    off = sum(not each.is_right for each in judged.values())
    if was_wrong or off:
        due.mark(session, key.run_id, source="notary")
    # Old reports are cleared; that of the first step stays.
    first = select(table.step).where(table.run_id == key.run_id).order_by(table.step).limit(1).scalar_subquery()
    old = (table.run_id == key.run_id, table.step < key.step - KEPT_STEPS, table.step > first)
    session.execute(update(table).where(*old, table.report.is_not(None)).values(report=None))
    counts: dict[str, float | None] = {ENGINES_OFF: float(off), "notary/engines": float(len(judged))}
    body = scalars.ScalarsPut(source="notary", values=counts)
    scalars.store_scalars(session, events, security.UNRESTRICTED, key, body)


def weights_of_newest_steps(session: Session, run_id: str, steps: int) -> list[WeightsRecord]:
    """Return what the engines held after the newest syncs of active steps, by step and engine."""
    table = WeightsReport
    judged = (table.run_id == run_id, attempts.active_rows(session, run_id, table), table.verdict.is_not(None))
    newest = select(table.step).where(*judged).distinct().order_by(table.step.desc()).limit(steps)
    query = select(table).options(defer(table.report)).where(*judged, table.step.in_(newest))
    rows = session.scalars(query.order_by(table.step, table.holder))
    return [_record(row) for row in rows]


def checksums_of_step(session: Session, key: StepKey) -> tuple[str, ...]:
    """Return a sentence for each engine about what it held after the weight sync of a step."""
    return tuple(_record(row).sentence for row in _rows_of_step(session, key) if row.verdict is not None)


def findings_of_run(session: Session, run_id: str) -> list[findings.Finding]:
    """Return the finding of engines that hold other weights, over the newest active steps."""
    wrong: dict[int, list[str]] = {}
    for record in weights_of_newest_steps(session, run_id, FINDING_STEPS):
        if not record.is_right:
            wrong.setdefault(record.step, []).append(record.sentence)
    return findings.newest_of_steps(
        (step, [findings.Finding(WEIGHTS_DIFFER, "critical", TITLE, " ".join(wrong[step]), WHAT_TO_DO)])
        for step in sorted(wrong, reverse=True)
    )


def _rows_of_step(session: Session, key: StepKey) -> list[WeightsReport]:
    query = select(WeightsReport).filter_by(**key._asdict()).order_by(WeightsReport.holder)
    return list(session.scalars(query))


def _announcements(session: Session, key: StepKey) -> Iterator[tuple[int, bytes]]:
    """Yield the earlier active announcements that are kept, packed, the newest first, up to `_MOST_HISTORY_BYTES`."""
    table = WeightsReport
    active = attempts.active_rows(session, key.run_id, table)
    kept = (table.run_id == key.run_id, table.holder == _TRAINER, table.report.is_not(None), table.step < key.step)
    query = select(table.step, table.report).where(active, *kept).order_by(table.step.desc()).limit(KEPT_STEPS + 1)
    size = 0
    for step, report in session.execute(query):
        size += len(report or b"")
        if size > _MOST_HISTORY_BYTES:
            return
        yield step, report or b""


def _verdict_before(session: Session, row: WeightsReport) -> bytes | None:
    table = WeightsReport
    of_engine = (table.run_id == row.run_id, table.holder == row.holder, table.verdict.is_not(None))
    query = select(table.verdict).where(*of_engine, table.step < row.step)
    return session.scalar(query.order_by(table.step.desc(), table.attempt.desc()).limit(1))


def _record(row: WeightsReport) -> WeightsRecord:
    assert row.verdict is not None
    engine, verdict = row.holder.removeprefix(_ENGINE), parse(Verdict, weights_reports.unpacked(row.verdict))
    return WeightsRecord(
        step=row.step,
        attempt=row.attempt,
        engine=engine,
        is_right=verdict.is_right,
        sentence=verdict_in_words(engine, row.engines or 1, verdict),
        verdict=verdict,
    )
