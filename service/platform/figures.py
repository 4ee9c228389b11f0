"""Figures of one service process: what waits, what is full, how long writes and the event loop take."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from foreshock.clock import now_us
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.jobs import JobRecord, JobRunner

_LOOK_SECONDS = 0.5
# A minute of looks at the event loop.
_LOOKS = 120


class Polls(Protocol):
    """The long polls of the process, of which this part of the service knows only the figures."""

    @property
    def count(self) -> int:
        """Return how many wait."""
        ...


@dataclass
class LoopDelays:
    """How late the event loop is: every request waits so long for its turn."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_LOOKS))

    async def watch(self) -> None:
        """Look at the loop's delay again and again, until cancelled."""
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(_LOOK_SECONDS)
            self.seconds.append(max(0.0, time.perf_counter() - begin - _LOOK_SECONDS))


@dataclass(frozen=True)
class ServiceFigures:
    """The sources of the figures of this process."""

    context: ServiceContext
    runners: tuple[JobRunner, ...]
    polls: Polls
    version: str
    loop_delays: LoopDelays = field(default_factory=LoopDelays)
    started_at_us: int = field(default_factory=now_us)

    @property
    def job_records(self) -> dict[str, JobRecord]:
        """Return how the runs of each job in this process went."""
        return {name: record for runner in self.runners for name, record in runner.records.items()}

    @property
    def write_seconds(self) -> Sequence[float]:
        """Return the durations of the newest writes to the database, waiting included."""
        return list(self.context.database.write_seconds)


@dataclass(frozen=True)
class Gauge:
    """A gauge of one service process: its name, its help and how it is read."""

    name: str
    help: str
    read: Callable[[ServiceFigures], float]


GAUGES: tuple[Gauge, ...] = (
    Gauge("start_time_seconds", "Start of this process, in seconds since 1970", lambda own: own.started_at_us / 1e6),
    Gauge("resident_memory_bytes", "Memory of this process", lambda _: resident_bytes()),
    Gauge(
        "uploads_in_progress",
        "Uploads that are received, decoded or stored",
        lambda own: own.context.uploads.taken,
    ),
    Gauge("upload_places", "Uploads that may be under way at a time", lambda own: own.context.uploads.most),
    Gauge("long_polls_waiting", "Requests that wait for a change of advice or alerts", lambda own: own.polls.count),
    Gauge(
        "decoders_ready",
        "1 if the processes that decode uploads have started",
        lambda own: own.context.decoders.is_warm,
    ),
    Gauge(
        "writes_waiting",
        "Units of work that wait for SQLite's writer",
        lambda own: own.context.database.writes_waiting,
    ),
    Gauge(
        "write_p99_seconds",
        "99th percentile of the newest writes to the database",
        lambda own: percentile(own.write_seconds, 99),
    ),
    Gauge(
        "event_loop_delay_max_seconds",
        "Longest wait for the event loop in the last minute",
        lambda own: max(own.loop_delays.seconds, default=0.0),
    ),
)

# Metrics of the jobs that run in a service process, labelled by job.
JOB_RUNS = "foreshock_service_job_runs"
JOB_FAILURES = "foreshock_service_job_failures"
JOB_LAST_RUN = "foreshock_service_job_last_run_timestamp_seconds"


def gauge_name(gauge: Gauge) -> str:
    """Return the name of a gauge as Prometheus stores it."""
    return f"foreshock_service_{gauge.name}"


def exposed_names() -> dict[str, tuple[str, ...]]:
    """Return the labels of each metric of a process, by its name as Prometheus stores it."""
    jobs = (f"{JOB_RUNS}_total", f"{JOB_FAILURES}_total", JOB_LAST_RUN)
    return {gauge_name(gauge): () for gauge in GAUGES} | dict.fromkeys(jobs, ("job",))


class ServiceCollector:
    """The figures as Prometheus metrics; a scrape of several processes behind one port gets those of one of them."""

    def __init__(self, figures: ServiceFigures) -> None:
        self._figures = figures

    def describe(self) -> list[Metric]:
        """Return nothing: the registry must not collect to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Return the metrics."""
        for gauge in GAUGES:
            yield GaugeMetricFamily(gauge_name(gauge), gauge.help, value=float(gauge.read(self._figures)))
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
    """Return a percentile; 0 of no values."""
    return float(np.percentile(values, share)) if values else 0.0


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 where /proc does not tell it."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
