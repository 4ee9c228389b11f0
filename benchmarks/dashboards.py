"""Bars of the Grafana dashboards: every query has data and is fast, every metric is shown, alerts arrive.

A real service on PostgreSQL under real runs is scraped by a real Prometheus with the shipped configuration, intervals
and waits included. Queries are asked as Grafana asks them: SQL as its reader, of the recorded run and of one of 10,000
steps; PromQL as a range of an hour or an instant. Grafana itself is not run.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psycopg

from benchmarks.queries.filled_database import fill_postgresql, start_runs
from dashboards.generate import dashboards
from tests.dashboards.filling import filled, filled_expression
from tests.dashboards.metrics import LABELS, REASONS, metrics_without_panel
from tests.dashboards.monitored import (
    READER_PASSWORD,
    Monitored,
    firing,
    make_reader,
    monitored_service,
    queries,
    send_broken_run,
)
from tests.monitoring import ask, wait_for

STEPS, REPEATS = 10_000, 5
BAR_QUERY_SECONDS = 1.0
"""A dashboard asks its queries at the same time, and refreshes every 30 s."""
BAR_ALERT_SECONDS = 65.0
"""The shipped waits, a scrape and an evaluation of 15 s and 30 s of Alertmanager, and 5 s for the work."""
DATA_SECONDS = 120.0
RANGE_SECONDS, POINTS = 3600, 240


@dataclass(frozen=True, slots=True)
class Asked:
    """One query: its panel, whether it had data, and the median seconds of an answer."""

    where: str
    has_data: bool
    seconds: float


def main() -> int:
    """Measure the bars; return 1 if one is not reached."""
    with (
        tempfile.TemporaryDirectory(prefix="foreshock-dashboards-") as name,
        monitored_service(Path(name), hurried=False) as monitored,
    ):
        delay = alert_delay(monitored)
        (long,) = start_runs(monitored.service, 1, "long")
        fill_postgresql(monitored.database, long, STEPS)
        make_reader(monitored.database)
        prometheus = ask_prometheus(monitored)
        with psycopg.connect(
            monitored.database, user="foreshock_reader", password=READER_PASSWORD, autocommit=True
        ) as reader:
            recorded = ask_postgresql(reader, monitored.run)
            of_long = ask_postgresql(reader, long)
    return _report(prometheus, recorded, of_long, delay)


def alert_delay(monitored: Monitored) -> float:
    """Return the seconds from the upload of a step with bad log-probs until the webhook has the alert."""
    start = time.perf_counter()
    run = send_broken_run(monitored.service)
    wait_for(lambda: firing(monitored, run), seconds=240)
    return time.perf_counter() - start


def ask_prometheus(monitored: Monitored) -> list[Asked]:
    """Ask every PromQL query, once all of them have data or the time for it is over."""
    found = [(where, filled_expression(expression, monitored.run)) for where, expression in queries("expr")]
    deadline = time.monotonic() + DATA_SECONDS
    while time.monotonic() < deadline and not all(ask(monitored.prometheus, each) for _, each in found):
        time.sleep(1.0)

    def in_range(expression: str) -> list[Any]:
        end = time.time()
        window = {"start": end - RANGE_SECONDS, "end": end, "step": RANGE_SECONDS / POINTS}
        answer = httpx.get(
            f"{monitored.prometheus}/api/v1/query_range", params={"query": expression, **window}, timeout=60
        )
        result: list[Any] = answer.raise_for_status().json()["data"]["result"]
        return result

    return [_timed(where, partial(in_range, expression)) for where, expression in found]


def ask_postgresql(reader: psycopg.Connection[tuple[Any, ...]], run: str) -> list[Asked]:
    """Ask every SQL query of a run as Grafana's reader."""
    texts = [(where, filled(sql, run).encode()) for where, sql in queries("rawSql")]

    def rows(text: bytes) -> list[tuple[Any, ...]]:
        return reader.execute(text).fetchall()

    return [_timed(where, partial(rows, text)) for where, text in texts]


def _timed(where: str, query: Callable[[], Sequence[Any]]) -> Asked:
    seconds, rows = [], 0
    for _ in range(REPEATS):
        start = time.perf_counter()
        rows = len(query())
        seconds.append(time.perf_counter() - start)
    return Asked(where, rows > 0, median(seconds))


def _report(prometheus: list[Asked], recorded: list[Asked], of_long: list[Asked], delay: float) -> int:
    panels = sum(panel["type"] != "row" for dashboard in dashboards() for panel in dashboard.render()["panels"])
    empty = [asked.where for asked in (*prometheus, *recorded) if not asked.has_data]
    unexplained = metrics_without_panel() ^ REASONS.keys()
    print(f"{len(dashboards())} dashboards, {panels} panels, {len(prometheus) + len(recorded)} queries")
    print(f"{'queries':<44}{'number':>8}{'with data':>11}{'median ms':>11}{'slowest ms':>12}  slowest panel")
    kinds = {
        "Prometheus, a range of an hour": prometheus,
        "PostgreSQL, the recorded run": recorded,
        f"PostgreSQL, a run of {STEPS:,} steps": of_long,
    }
    for title, asked in kinds.items():
        slowest = max(asked, key=lambda each: each.seconds)
        typical = 1000 * median(each.seconds for each in asked)
        print(
            f"{title:<44}{len(asked):>8}{sum(each.has_data for each in asked):>11}{typical:>11.1f}"
            f"{1000 * slowest.seconds:>12.1f}  {slowest.where}"
        )
    print("a run that was only measured has no alerts, probes and advice: some queries of the long run have no data")
    for where in empty:
        print(f"no data: {where}")
    print(f"metrics: {len(LABELS)}, with a panel {len(LABELS) - len(REASONS)}, with a reason {len(REASONS)}")
    for name in sorted(unexplained):
        print(f"neither a panel nor a reason, or both: {name}")
    print(f"from the upload of a bad step to the webhook: {delay:.1f} s")
    slowest_query = max(each.seconds for asked in kinds.values() for each in asked)
    reached = not empty and not unexplained and slowest_query < BAR_QUERY_SECONDS and delay < BAR_ALERT_SECONDS
    print(
        f"queries={len(prometheus) + len(recorded)} without_data={len(empty)} slowest_ms={1000 * slowest_query:.1f} "
        f"metrics={len(LABELS)} unexplained_metrics={len(unexplained)} alert_s={delay:.1f} reached={int(reached)}"
    )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
