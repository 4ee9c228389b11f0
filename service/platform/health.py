"""HTTP: `/livez` for liveness, `/readyz` for readiness to take an upload, `/v1/service` for the service's operators."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar, cast

from anyio import fail_after, to_thread
from fastapi import APIRouter, Depends, Request, Response, status
from pydantic import BaseModel
from sqlalchemy import Select, func, select, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from foreshock.api.service import (
    BacklogRecord,
    DatabaseRecord,
    LongPollsRecord,
    ProcessRecord,
    ReadinessRecord,
    ServiceJobRecord,
    ServiceRecord,
    SpaceRecord,
    StorageRecord,
    UploadsRecord,
)
from foreshock.clock import now_us
from foreshock_service.platform import jobs, security
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database.opening import current_revision, newest_revision
from foreshock_service.platform.database.tables import AttemptClient, DueReplay, FileRemoval, Run, Step
from foreshock_service.platform.figures import ServiceFigures, percentile, resident_bytes

Part = TypeVar("Part")
router = APIRouter(tags=["health"])

CHECK_SECONDS = 3.0
"""A check that takes longer has failed: a frozen database answers nothing."""

# A client sends a sign of life at least every half a minute.
_HEARD_SECONDS = 120


class Liveness(BaseModel):
    """Liveness of the process."""

    status: str


@router.get("/livez")
async def livez() -> Liveness:
    """Report that the process answers; restart it if it does not."""
    # A coroutine: it needs no thread, so it answers while all of them are taken.
    return Liveness(status="alive")


@router.get(
    "/readyz", responses={503: {"model": ReadinessRecord, "description": "Not ready; the checks give the reason"}}
)
async def readyz(context: Context, response: Response) -> ReadinessRecord:
    """Check that the database can be written and is migrated, the token store too, and that the decoders started."""
    readiness = await check_readiness(context)
    if not readiness.ready:
        response.status_code = status.HTTP_503_SERVICE_UNAVAILABLE
    return readiness


async def check_readiness(context: ServiceContext) -> ReadinessRecord:
    """Return the outcome of every check; they run side by side and take CHECK_SECONDS at most."""
    database, migrations, token_store = await asyncio.gather(
        _outcome(context, context.database.check_writable),
        _outcome(context, partial(_check_migrated, context)),
        _outcome(context, context.store.check_writable),
    )
    checks = {
        "database": database,
        "migrations": migrations,
        "token_store": token_store,
        "decoders": context.decoders.state,
    }
    ready = all(outcome == "ok" for outcome in checks.values())
    return ReadinessRecord(
        ready=ready, checks=checks, details={"token_pass": context.decoders.token_pass or "not known yet"}
    )


def _check_migrated(context: ServiceContext) -> None:
    with context.database.read() as session:
        has = current_revision(session.connection())
    if has != newest_revision():
        raise RuntimeError(f"the database has revision {has}, this release requires {newest_revision()}")


async def _outcome(context: ServiceContext, check: Callable[[], None]) -> str:
    try:
        with fail_after(CHECK_SECONDS):
            await to_thread.run_sync(check, abandon_on_cancel=True, limiter=context.check_threads)
    except TimeoutError:
        return f"failed: no answer within {CHECK_SECONDS:g} s"
    except Exception as error:
        # Only the class: messages of drivers can contain addresses and user names.
        return str(error) if isinstance(error, RuntimeError) else f"failed: {type(error).__name__}"
    return "ok"


async def _figures_of(request: Request) -> ServiceFigures:
    return cast(ServiceFigures, request.app.state.figures)


FiguresOfApp = Annotated[ServiceFigures, Depends(_figures_of)]


@router.get("/v1/service")
async def read_service(context: Context, principal: security.Administrator, figures: FiguresOfApp) -> ServiceRecord:
    """Return the state of the service: the process that answers, its queues and its background jobs."""
    return await service_state(context, figures)


async def service_state(context: ServiceContext, figures: ServiceFigures) -> ServiceRecord:
    """Return the state of the service; parts that do not answer in time are None."""
    writes = figures.write_seconds
    shards_per_second, tokens_per_second = context.ingest_rate.per_second()
    readiness, storage, backlog = await asyncio.gather(
        check_readiness(context),
        _in_time(context, partial(read_storage, context)),
        _in_time(context, partial(read_backlog, context)),
    )
    return ServiceRecord(
        version=figures.version,
        process=ProcessRecord(
            name=jobs.process_name(),
            process_id=os.getpid(),
            processes=context.settings.processes,
            started_at_us=figures.started_at_us,
            resident_bytes=resident_bytes(),
            event_loop_delay_max_seconds=max(figures.loop_delays.seconds, default=0.0),
        ),
        readiness=readiness,
        uploads=UploadsRecord(
            in_progress=context.uploads.taken,
            places=context.uploads.most,
            decoding=context.decoders.bodies,
            decoding_places=context.decoders.most_bodies,
            shards_per_second=shards_per_second,
            tokens_per_second=tokens_per_second,
        ),
        database=DatabaseRecord(
            kind="sqlite" if context.database.is_sqlite else "postgresql",
            writes_waiting=context.database.writes_waiting,
            write_p50_seconds=percentile(writes, 50),
            write_p99_seconds=percentile(writes, 99),
        ),
        long_polls=LongPollsRecord(waiting=figures.polls.count),
        storage=storage,
        backlog=backlog,
        jobs=_jobs(figures),
    )


async def _in_time(context: ServiceContext, read: Callable[[], Part]) -> Part | None:
    """Return what `read` returns; None if it fails or takes longer than a check of readiness may."""
    with suppress(Exception):
        with fail_after(CHECK_SECONDS):
            return await to_thread.run_sync(read, abandon_on_cancel=True, limiter=context.check_threads)
    return None


def _jobs(figures: ServiceFigures) -> tuple[ServiceJobRecord, ...]:
    records = sorted(figures.job_records.items())
    return tuple(
        ServiceJobRecord(
            name=name,
            holder=jobs.process_name(),
            is_running=record.started_at_us is not None and record.finished_at_us is None,
            runs=record.runs,
            started_at_us=record.started_at_us,
            finished_at_us=record.finished_at_us,
            error=record.error,
        )
        for name, record in records
    )


def read_storage(context: ServiceContext) -> StorageRecord:
    """Return the space that is taken and left. Raises what the database and the file system raise."""
    settings = context.settings
    with context.database.read() as session:
        taken, revision = _database_bytes(session), current_revision(session.connection())
    file = make_url(settings.database_url).database if context.database.is_sqlite else None
    return StorageRecord(
        database_bytes=taken,
        database_space=None if file is None else _space(Path(file).absolute().parent),
        revision=revision,
        newest_revision=newest_revision(),
        token_store="folder" if settings.store_is_folder else "s3",
        token_space=_space(settings.store_folder) if settings.store_is_folder else None,
    )


def read_backlog(context: ServiceContext) -> BacklogRecord:
    """Return the work that waits."""
    heard = AttemptClient.seen_at_us > now_us() - _HEARD_SECONDS * 1_000_000
    clients = select(func.count(), func.coalesce(func.sum(AttemptClient.undelivered), 0))
    with context.database.read() as session:
        # The runs come first: their clients are found by an index.
        found = clients.join(Run, Run.id == AttemptClient.run_id).where(Run.state == "running", heard)
        number, undelivered = session.execute(found).one()
        return BacklogRecord(
            steps_to_fold=_count(session, select(Step.run_id).where(Step.folded_shards < Step.received_shards)),
            runs_to_replay=_count(session, select(DueReplay.run_id)),
            files_to_remove=_count(session, select(FileRemoval.file)),
            clients=number,
            undelivered_items=int(undelivered),
        )


def _count(session: Session, query: Select[str]) -> int:
    return int(session.scalar(select(func.count()).select_from(query.subquery())) or 0)


def _database_bytes(session: Session) -> int:
    if session.get_bind().dialect.name == "postgresql":
        return int(session.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
    pages, size = (session.execute(text(f"PRAGMA {name}")).scalar_one() for name in ("page_count", "page_size"))
    return int(pages) * int(size)


def _space(folder: Path) -> SpaceRecord:
    # A folder that does not exist yet will be in the first one above it that does.
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    usage = shutil.disk_usage(existing)
    return SpaceRecord(free_bytes=usage.free, total_bytes=usage.total)
