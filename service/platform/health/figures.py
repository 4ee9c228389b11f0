"""Figures of one service process: what waits, what is full, how long writes and the event loop take."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from foreshock.clock import now_us
from service.platform.context import ServiceContext
from service.platform.jobs.runner import JobRecord, JobRunner

_LOOK_SECONDS = 0.5
# A minute of looks at the event loop.
_LOOKS = 120


class Polls(Protocol):
    """The long polls of the process, of which this part of the service knows only the figures."""

    @property
    def count(self) -> int:
        """Return how many wait."""
        ...

    @property
    def hears_other_processes(self) -> bool:
        """Return whether changes of other processes are heard at once, or there are none to hear."""
        ...

    @property
    def reconnects(self) -> int:
        """Return how often the connection that hears of changes was lost."""
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


class ServiceCollector:
    """The figures as Prometheus metrics; a scrape of several processes behind one port gets those of one of them."""

    def __init__(self, figures: ServiceFigures) -> None:
        self._figures = figures

    def describe(self) -> list[Metric]:
        """Return nothing: the registry must not collect to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Return the metrics."""
        figures = self._figures
        uploads, database = figures.context.uploads, figures.context.database
        writes, polls = figures.write_seconds, figures.polls
        gauges = {
            "start_time_seconds": ("Start of this process, in seconds since 1970", figures.started_at_us / 1e6),
            "resident_memory_bytes": ("Memory of this process", resident_bytes()),
            "uploads_in_progress": ("Uploads that are received, decoded or stored", uploads.taken),
            "upload_places": ("Uploads that may be under way at a time", uploads.most),
            "long_polls_waiting": ("Requests that wait for a change of advice or alerts", polls.count),
            "hears_other_processes": ("1 if changes of other processes are heard at once", polls.hears_other_processes),
            "decoders_ready": ("1 if the processes that decode uploads have started", figures.context.decoders.is_warm),
            "writes_waiting": ("Units of work that wait for SQLite's writer", database.writes_waiting),
            "write_p99_seconds": ("99th percentile of the newest writes to the database", percentile(writes, 99)),
            "event_loop_delay_max_seconds": (
                "Longest wait for the event loop in the last minute", max(figures.loop_delays.seconds, default=0.0),
            ),
        }  # fmt: skip
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"foreshock_service_{name}", text, value=float(value))
        runs = CounterMetricFamily("foreshock_service_job_runs", "Runs of a job in this process", labels=["job"])
        failures = CounterMetricFamily("foreshock_service_job_failures", "Runs that failed", labels=["job"])
        newest = GaugeMetricFamily(
            "foreshock_service_job_last_run_timestamp_seconds", "End of the newest run in this process", labels=["job"]
        )
        for name, record in figures.job_records.items():
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
