"""HTTP: `/livez` (liveness), `/readyz` (readiness for uploads), `/v1/service` (for operators), and process metrics."""

import asyncio
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar, cast

import numpy as np
from anyio import fail_after, to_thread
from fastapi import Depends, Request, Response, status
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from pydantic import BaseModel
from sqlalchemy import Select, func, select, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from foreshock.api import service
from foreshock.api.records import from_attributes
from foreshock.clock import now_us
from foreshock_service.platform import jobs, parameters, security
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database.opening import current_revision, newest_revision
from foreshock_service.platform.database.tables import AttemptClient, DueReplay, FileRemoval, Run, Step

_LOOK_SECONDS = 0.5
# Samples of the event loop's delay that are kept: those of a minute.
_LOOKS = 120


@dataclass(frozen=True)
class ServiceFigures:
    """The sources of this process's metrics."""

    context: ServiceContext
    runners: tuple[jobs.JobRunner, ...]
    count_polls: Callable[[], int]
    version: str
    started_at_us: int = field(default_factory=now_us)
    loop_delays: deque[float] = field(default_factory=lambda: deque(maxlen=_LOOKS))

    async def watch_loop(self) -> None:
        """Sample the event loop's delay until cancelled; every request waits that long for its turn."""
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(_LOOK_SECONDS)
            self.loop_delays.append(max(0.0, time.perf_counter() - begin - _LOOK_SECONDS))

    @property
    def longest_loop_delay(self) -> float:
        """Return the longest wait for the event loop in the last minute, in seconds."""
        return max(self.loop_delays, default=0.0)

    @property
    def job_records(self) -> dict[str, jobs.JobRecord]:
        """Return the record of each job in this process, by the job's name."""
        return {name: record for runner in self.runners for name, record in runner.records.items()}

    @property
    def write_seconds(self) -> Sequence[float]:
        """Return the durations of the newest writes to the database, waiting included."""
        return list(self.context.database.write_seconds)


@dataclass(frozen=True)
class Gauge:
    """A gauge of one service process: name, help text, and the function that reads its value."""

    name: str
    help: str
    read: Callable[[ServiceFigures], float]

    @property
    def full_name(self) -> str:
        """Return the name as Prometheus stores it."""
        return f"foreshock_service_{self.name}"


GAUGES: tuple[Gauge, ...] = (
    Gauge("start_time_seconds", "Start of this process, in seconds since 1970", lambda own: own.started_at_us / 1e6),
    Gauge("resident_memory_bytes", "Memory of this process", lambda _: resident_bytes()),
    Gauge("uploads_in_progress", "Uploads that are received, decoded or stored", lambda own: own.context.uploads.taken),
    Gauge("upload_places", "Uploads that may be under way at a time", lambda own: own.context.uploads.most),
    Gauge("long_polls_waiting", "Requests that wait for a change of advice or alerts", lambda own: own.count_polls()),
    Gauge(
        "decoders_ready",
        "1 if the processes that decode uploads have started",
        lambda own: own.context.decoders.is_warm,
    ),
    Gauge(
        "writes_waiting", "Units of work that wait for SQLite's writer", lambda own: own.context.database.writes_waiting
    ),
    Gauge(
        "write_p99_seconds",
        "99th percentile of the newest writes to the database",
        lambda own: percentile(own.write_seconds, 99),
    ),
    Gauge(
        "event_loop_delay_max_seconds",
        "Longest wait for the event loop in the last minute",
        lambda own: own.longest_loop_delay,
    ),
)

# Metrics of the jobs that run in a service process, labelled by job.
JOB_RUNS = "foreshock_service_job_runs"
JOB_FAILURES = "foreshock_service_job_failures"
JOB_LAST_RUN = "foreshock_service_job_last_run_timestamp_seconds"


def exposed_names() -> dict[str, tuple[str, ...]]:
    """Return the labels of each metric of a process, by its name as Prometheus stores it."""
    jobs = (f"{JOB_RUNS}_total", f"{JOB_FAILURES}_total", JOB_LAST_RUN)
    return {gauge.full_name: () for gauge in GAUGES} | dict.fromkeys(jobs, ("job",))


class ServiceCollector:
    """Prometheus collector of this process's metrics. If several processes share a port, a scrape reads one of them."""

    def __init__(self, figures: ServiceFigures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Return the metrics."""
        for gauge in GAUGES:
            yield GaugeMetricFamily(gauge.full_name, gauge.help, value=float(gauge.read(self._figures)))
        runs = CounterMetricFamily(JOB_RUNS, "Runs of a job in this process", labels=["job"])
        failures = CounterMetricFamily(JOB_FAILURES, "Runs that failed", labels=["job"])
        newest = GaugeMetricFamily(JOB_LAST_RUN, "End of the newest run in this process", labels=["job"])
        for name, record in self._figures.job_records.items():
            runs.add_metric([name], record.runs)
            failures.add_metric([name], record.failures)
            if record.finished_at_us is not None:
                newest.add_metric([name], record.finished_at_us / 1e6)
        yield from (runs, failures, newest)


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile of the values; 0 if there are none."""
    return float(np.percentile(values, share)) if values else 0.0


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if /proc does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


Part = TypeVar("Part")
router = parameters.api_router(tags=["health"])

CHECK_SECONDS = 3.0
"""A check that takes longer has failed: a frozen database never answers."""

# A client without a heartbeat for so long is not counted; by default one is sent every 30 s.
_HEARD_SECONDS = 120


class Liveness(BaseModel):
    """Liveness of the process."""

    status: str


@router.get("/livez")
async def livez() -> Liveness:
    """Report that the process answers; restart it if it does not."""
    # A coroutine: it needs no thread, so it answers even if all threads are taken.
    return Liveness(status="alive")


@router.get(
    "/readyz",
    responses={503: {"model": service.ReadinessRecord, "description": "Not ready; the checks give the reason"}},
)
async def readyz(context: Context, response: Response) -> service.ReadinessRecord:
    """Check that the database can be written and is migrated, the token store too, and that the decoders started."""
    readiness = await check_readiness(context)
    if not readiness.ready:
        response.status_code = status.HTTP_503_SERVICE_UNAVAILABLE
    return readiness


async def check_readiness(context: ServiceContext) -> service.ReadinessRecord:
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
    return service.ReadinessRecord(
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
async def read_service(
    context: Context, principal: security.Administrator, figures: FiguresOfApp
) -> service.ServiceRecord:
    """Return the state of the service: the process that answers, its queues and its background jobs."""
    return await service_state(context, figures)


async def service_state(context: ServiceContext, figures: ServiceFigures) -> service.ServiceRecord:
    """Return the state of the service; parts that do not answer in time are None."""
    writes = figures.write_seconds
    shards_per_second, tokens_per_second = context.ingest_rate.per_second()
    readiness, storage, backlog = await asyncio.gather(
        check_readiness(context),
        _in_time(context, partial(read_storage, context)),
        _in_time(context, partial(read_backlog, context)),
    )
    return service.ServiceRecord(
        version=figures.version,
        process=service.ProcessRecord(
            name=jobs.process_name(),
            process_id=os.getpid(),
            processes=context.settings.processes,
            started_at_us=figures.started_at_us,
            resident_bytes=resident_bytes(),
            event_loop_delay_max_seconds=figures.longest_loop_delay,
        ),
        readiness=readiness,
        uploads=service.UploadsRecord(
            in_progress=context.uploads.taken,
            places=context.uploads.most,
            decoding=context.decoders.bodies,
            decoding_places=context.decoders.most_bodies,
            shards_per_second=shards_per_second,
            tokens_per_second=tokens_per_second,
        ),
        database=service.DatabaseRecord(
            kind="sqlite" if context.database.is_sqlite else "postgresql",
            writes_waiting=context.database.writes_waiting,
            write_p50_seconds=percentile(writes, 50),
            write_p99_seconds=percentile(writes, 99),
        ),
        long_polls=service.LongPollsRecord(waiting=figures.count_polls()),
        storage=storage,
        backlog=backlog,
        jobs=_jobs(figures),
    )


async def _in_time(context: ServiceContext, read: Callable[[], Part]) -> Part | None:
    """Return the result of `read`; None if it fails or takes longer than CHECK_SECONDS."""
    with suppress(Exception):
        with fail_after(CHECK_SECONDS):
            return await to_thread.run_sync(read, abandon_on_cancel=True, limiter=context.check_threads)
    return None


def _jobs(figures: ServiceFigures) -> tuple[service.ServiceJobRecord, ...]:
    records = sorted(figures.job_records.items())
    return tuple(
        from_attributes(
            service.ServiceJobRecord,
            record,
            name=name,
            holder=jobs.process_name(),
            is_running=record.started_at_us is not None and record.finished_at_us is None,
        )
        for name, record in records
    )


def read_storage(context: ServiceContext) -> service.StorageRecord:
    """Return the used and the free space. Raises the errors of the database and of the file system."""
    settings = context.settings
    with context.database.read() as session:
        taken, revision = _database_bytes(session), current_revision(session.connection())
    file = make_url(settings.database_url).database if context.database.is_sqlite else None
    return service.StorageRecord(
        database_bytes=taken,
        database_space=None if file is None else _space(Path(file).absolute().parent),
        revision=revision,
        newest_revision=newest_revision(),
        token_store="folder" if settings.store_is_folder else "s3",
        token_space=_space(settings.store_folder) if settings.store_is_folder else None,
    )


def read_backlog(context: ServiceContext) -> service.BacklogRecord:
    """Return the amounts of pending work."""
    heard = AttemptClient.seen_at_us > now_us() - _HEARD_SECONDS * 1_000_000
    clients = select(func.count(), func.coalesce(func.sum(AttemptClient.undelivered), 0))
    with context.database.read() as session:
        # The runs come first: their clients are found by an index.
        found = clients.join(Run, Run.id == AttemptClient.run_id).where(Run.state == "running", heard)
        number, undelivered = session.execute(found).one()
        return service.BacklogRecord(
            steps_to_fold=_count(session, select(Step.run_id).where(Step.folded_shards < Step.received_shards)),
            runs_to_replay=_count(session, select(DueReplay.run_id)),
            files_to_remove=_count(session, select(FileRemoval.file).where(FileRemoval.reason != "orphan")),
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


def _space(folder: Path) -> service.SpaceRecord:
    # A folder that does not exist yet will be made inside its nearest existing parent.
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    usage = shutil.disk_usage(existing)
    return service.SpaceRecord(free_bytes=usage.free, total_bytes=usage.total)
