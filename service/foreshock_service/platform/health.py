"""HTTP: `/livez` (liveness), `/readyz` (readiness), `/v1/service` (release and capacity), process metrics."""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from anyio import fail_after, to_thread
from fastapi import Request, Response, status
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from pydantic import BaseModel

from foreshock.api import service
from foreshock.clock import now_us
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from foreshock_service.platform import jobs, parameters, security
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database.opening import current_revision, newest_revision

_LOOK_SECONDS = 0.5
# Samples of the event loop's delay that are kept: those of a minute.
_LOOKS = 120


# Gauges of one service process, by the end of their names, with their help texts.
GAUGES = {
    "start_time_seconds": "Start of this process, in seconds since 1970",
    "resident_memory_bytes": "Memory of this process",
    "uploads_in_progress": "Uploads that are received, decoded or stored",
    "upload_places": "Uploads that may be under way at a time",
    "long_polls_waiting": "Requests that wait for a change of advice or alerts",
    "decoders_ready": "1 if the processes that decode uploads have started",
    "write_p99_seconds": "99th percentile of the newest writes to the database",
    "event_loop_delay_max_seconds": "Longest wait for the event loop in the last minute",
}
PREFIX = "foreshock_service_"
# Metrics of the jobs that run in a service process, labelled by job.
JOB_RUNS = f"{PREFIX}job_runs"
JOB_FAILURES = f"{PREFIX}job_failures"
JOB_LAST_RUN = f"{PREFIX}job_last_run_timestamp_seconds"


@dataclass(eq=False)  # a registry keeps collectors by identity
class ServiceMetrics:
    """Prometheus collector of this process's metrics. If several processes share a port, a scrape reads one of them."""

    context: ServiceContext
    runners: tuple[jobs.JobRunner, ...]
    count_polls: Callable[[], int]
    started_at_us: int = field(default_factory=now_us)
    loop_delays: deque[float] = field(default_factory=lambda: deque(maxlen=_LOOKS))

    async def watch_loop(self) -> None:
        """Sample the event loop's delay until cancelled; every request waits that long for its turn."""
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(_LOOK_SECONDS)
            self.loop_delays.append(max(0.0, time.perf_counter() - begin - _LOOK_SECONDS))

    def collect(self) -> Iterator[Metric]:
        context = self.context
        # Waiting included; 0 without any.
        writes = list(context.database.write_seconds) or [0.0]
        values: dict[str, float] = {
            "start_time_seconds": self.started_at_us / 1e6,
            "resident_memory_bytes": resident_bytes(),
            "uploads_in_progress": context.uploads.taken,
            "upload_places": context.uploads.most,
            "long_polls_waiting": self.count_polls(),
            "decoders_ready": context.decoders.is_warm,
            "write_p99_seconds": float(np.percentile(writes, 99)),
            "event_loop_delay_max_seconds": max(self.loop_delays, default=0.0),
        }
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=values[name])
        runs = CounterMetricFamily(JOB_RUNS, "Runs of a job in this process", labels=["job"])
        failures = CounterMetricFamily(JOB_FAILURES, "Runs that failed", labels=["job"])
        newest = GaugeMetricFamily(JOB_LAST_RUN, "End of the newest run in this process", labels=["job"])
        for name, record in (each for runner in self.runners for each in runner.records.items()):
            runs.add_metric([name], record.runs)
            failures.add_metric([name], record.failures)
            if record.finished_at_us is not None:
                newest.add_metric([name], record.finished_at_us / 1e6)
        yield from (runs, failures, newest)


def resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


router = parameters.api_router(tags=["health"])

CHECK_SECONDS = 3.0
"""A check that takes longer has failed: a frozen database never answers."""


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

    def check_migrated() -> None:
        with context.database.read() as session:
            has = current_revision(session.connection())
        if has != newest_revision():
            raise RuntimeError(f"the database has revision {has}, this release requires {newest_revision()}")

    # The checks run side by side, and take CHECK_SECONDS at most.
    tried = (context.database.check_writable, check_migrated, context.store.check_writable)
    outcomes = await asyncio.gather(*(_outcome(context, check) for check in tried))
    checks = dict(zip(("database", "migrations", "token_store"), outcomes, strict=True))
    checks["decoders"] = context.decoders.state
    ready = all(outcome == "ok" for outcome in checks.values())
    if not ready:
        response.status_code = status.HTTP_503_SERVICE_UNAVAILABLE
    details = {"token_pass": context.decoders.token_pass or "not known yet"}
    return service.ReadinessRecord(ready=ready, checks=checks, details=details)


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


@router.get("/v1/service")
async def read_service(request: Request, context: Context, principal: security.Reader) -> service.ServiceRecord:
    """Return the release of the service and what it accepts at a time."""
    return service.ServiceRecord(
        version=request.app.version,
        statistics_version=STATISTICS_VERSION,
        processes=context.settings.processes,
        upload_places=context.uploads.most,
    )
