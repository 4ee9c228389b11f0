"""HTTP: `/v1/service`, the state of the service itself, for its operators."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, TypeVar, cast

from anyio import fail_after, to_thread
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field

from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.health.endpoints import CHECK_SECONDS, Readiness, check_readiness
from foreshock_service.platform.health.figures import ServiceFigures, percentile, resident_bytes
from foreshock_service.platform.health.storage import BacklogRead, StorageRead, read_backlog, read_storage
from foreshock_service.platform.jobs.leases import all_jobs
from foreshock_service.platform.jobs.runner import process_name
from foreshock_service.platform.security import Administrator

Part = TypeVar("Part")
router = APIRouter(tags=["health"])


class ProcessRead(BaseModel):
    """The process that answered."""

    name: str = Field(description="host, process id and a random part: as `holder` of a job")
    process_id: int
    processes: int = Field(description="processes that serve this address")
    started_at_us: int
    resident_bytes: int
    event_loop_delay_max_seconds: float = Field(description="of the last minute")


class UploadsRead(BaseModel):
    """Uploads of this process."""

    in_progress: int
    places: int
    decoding: int = Field(description="bodies that are decoded or wait for a decoder")
    decoding_places: int
    shards_per_second: float = Field(description="stored, over the last minute or since the start")
    tokens_per_second: float


class DatabaseRead(BaseModel):
    """The database, as this process sees it."""

    kind: str
    writes_waiting: int
    write_p50_seconds: float = Field(description="of the newest writes, waiting included")
    write_p99_seconds: float


class LongPollsRead(BaseModel):
    """Requests of this process that wait for a change."""

    waiting: int
    hears_other_processes: bool
    reconnects: int


class JobRead(BaseModel):
    """A background job. `holder` is the process that did it last; with several processes one does each job."""

    name: str
    holder: str
    is_running: bool
    runs: int
    started_at_us: int | None
    finished_at_us: int | None
    leased_until_us: int | None = Field(description="by the database's clock; null: not leased")
    error: str | None = Field(description="kind of the error of its last run; null: it went well, or runs")


class ServiceRead(BaseModel):
    """The state of the service itself."""

    version: str
    process: ProcessRead
    readiness: Readiness
    uploads: UploadsRead
    database: DatabaseRead
    long_polls: LongPollsRead
    storage: StorageRead | None = Field(description="null: the database or the store does not answer")
    backlog: BacklogRead | None = Field(description="null: the database does not answer")
    jobs: list[JobRead]


async def _figures_of(request: Request) -> ServiceFigures:
    return cast(ServiceFigures, request.app.state.figures)


FiguresOfApp = Annotated[ServiceFigures, Depends(_figures_of)]


@router.get("/v1/service")
async def read_service(context: Context, principal: Administrator, figures: FiguresOfApp) -> ServiceRead:
    """Return the state of the service: the process that answers, its queues, and the background jobs of all."""
    return await service_state(context, figures)


async def service_state(context: ServiceContext, figures: ServiceFigures) -> ServiceRead:
    """Return the state of the service; parts that do not answer in time are None."""
    writes = figures.write_seconds
    shards_per_second, tokens_per_second = context.ingest_rate.per_second()
    readiness, storage, backlog, jobs = await asyncio.gather(
        check_readiness(context),
        _in_time(context, partial(read_storage, context)),
        _in_time(context, partial(read_backlog, context)),
        _in_time(context, partial(_jobs, figures)),
    )
    return ServiceRead(
        version=figures.version,
        process=ProcessRead(
            name=process_name(),
            process_id=os.getpid(),
            processes=context.settings.processes,
            started_at_us=figures.started_at_us,
            resident_bytes=resident_bytes(),
            event_loop_delay_max_seconds=max(figures.loop_delays.seconds, default=0.0),
        ),
        readiness=readiness,
        uploads=UploadsRead(
            in_progress=context.uploads.taken,
            places=context.uploads.most,
            decoding=context.decoders.bodies,
            decoding_places=context.decoders.most_bodies,
            shards_per_second=shards_per_second,
            tokens_per_second=tokens_per_second,
        ),
        database=DatabaseRead(
            kind="sqlite" if context.database.is_sqlite else "postgresql",
            writes_waiting=context.database.writes_waiting,
            write_p50_seconds=percentile(writes, 50),
            write_p99_seconds=percentile(writes, 99),
        ),
        long_polls=LongPollsRead(
            waiting=figures.polls.count,
            hears_other_processes=figures.polls.hears_other_processes,
            reconnects=figures.polls.reconnects,
        ),
        storage=storage,
        backlog=backlog,
        jobs=jobs or [],
    )


async def _in_time(context: ServiceContext, read: Callable[[], Part]) -> Part | None:
    """Return what `read` returns; None if it fails or takes longer than a check of readiness may."""
    with suppress(Exception):
        with fail_after(CHECK_SECONDS):
            return await to_thread.run_sync(read, abandon_on_cancel=True, limiter=context.check_threads)
    return None


def _jobs(figures: ServiceFigures) -> list[JobRead]:
    """Return the leased jobs as the database has them, and this process's own as it has them."""
    shared: dict[str, JobRead] = {}
    if not figures.context.database.is_sqlite:
        with figures.context.database.read() as session:
            for row in all_jobs(session):
                shared[row.name] = JobRead(
                    name=row.name,
                    holder=row.holder,
                    is_running=row.leased_until_us > 0,
                    runs=row.runs,
                    started_at_us=row.started_at_us or None,
                    finished_at_us=row.finished_at_us,
                    leased_until_us=row.leased_until_us or None,
                    error=row.error,
                )
    own = [
        JobRead(
            name=name,
            holder=process_name(),
            is_running=record.started_at_us is not None and record.finished_at_us is None,
            runs=record.runs,
            started_at_us=record.started_at_us,
            finished_at_us=record.finished_at_us,
            leased_until_us=None,
            error=record.error,
        )
        for name, record in figures.job_records.items()
        if name not in shared
    ]
    return sorted([*shared.values(), *own], key=lambda job: job.name)
