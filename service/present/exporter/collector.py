"""The collector of one scrape: SQL aggregates as Prometheus samples.

Nothing is counted in memory: every process exports the same, a restart resets nothing, and finished runs disappear.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.core import Metric
from sqlalchemy.orm import Session

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.statistics.bucket_sums import BucketTable
from service.platform.context import ServiceContext
from service.platform.database.dialect import database_now_us
from service.platform.database.tables.probes import Attribution
from service.present.exporter import families, repository
from service.present.exporter.families import Family, Samples
from service.present.exporter.repository import ActiveRun, ComparisonKey
from service.replay.workers.service import count_live_workers
from service.watch.advice.service import states_of_runs

# Every run has this comparison. The buckets of others are on the pages.
_MOST_REMEMBERED_TABLES = 2_000


class BucketMemory:
    """Bucket tables that earlier scrapes read. A blob is read again only if its measurement is newer."""

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[ComparisonKey, int], BucketTable] = OrderedDict()

    def get(self, session: Session, key: ComparisonKey, computed_at_us: int) -> BucketTable | None:
        """Return the table of a measurement; None if there is none that this release can read."""
        known = self._tables.get((key, computed_at_us))
        if known is not None:
            return known
        blob = repository.statistics_of(session, key)
        if blob is None:
            return None
        table = ComparisonStatistics.from_bytes(blob).buckets()
        self._tables[key, computed_at_us] = table
        while len(self._tables) > _MOST_REMEMBERED_TABLES:
            self._tables.popitem(last=False)
        return table


class ForeshockCollector:
    """A Prometheus collector over the service's database; `project` None: the runs of every project."""

    def __init__(self, context: ServiceContext, version: str, buckets: BucketMemory, project: str | None) -> None:
        self._context = context
        self._version = version
        self._buckets = buckets
        self._project = project

    def describe(self) -> Iterator[Metric]:
        """Return the families without samples, so that registering asks no database."""
        return (family.samples() for family in families.FAMILIES)

    def collect(self) -> Iterator[Metric]:
        """Read the database once and return every family that has samples."""
        scrape = _Scrape()
        with self._context.database.read() as session:
            scrape.add(families.BUILD_INFO, (self._version,), 1)
            runs = self._runs(session, scrape)
            run_ids = [each.run.id for each in runs]
            if run_ids:
                self._measurements(session, scrape, run_ids)
                _attributions(scrape, repository.newest_attributions(session, run_ids).values())
                for run_id, rule, severity, count in repository.open_alerts(session, run_ids):
                    scrape.add(families.ALERTS_OPEN, (run_id, rule, severity), count)
                _advice(session, scrape, runs)
            self._probes(session, scrape)
        return iter(scrape.families())

    def _runs(self, session: Session, scrape: _Scrape) -> list[ActiveRun]:
        limit = self._context.settings.exporter_max_runs
        states = repository.runs_by_state(session, self._project)
        for state, count in states.items():
            scrape.add(families.RUNS, (state,), count)
        runs = repository.active_runs(session, self._project, limit)
        scrape.add(families.RUNS_EXPORTED, (), len(runs))
        scrape.add(families.RUNS_CUT, (), max(0, states.get("running", 0) - len(runs)))
        steps = repository.newest_closed_steps(session, [each.run.id for each in runs])
        for each in runs:
            run = each.run
            described = (run.project, run.key, run.name or "", run.model or "", run.model_kind or "")
            scrape.add(families.RUN_INFO, (run.id, *described), 1)
            scrape.add(families.ROLLOUTS, (run.id,), each.rollouts)
            scrape.add(families.TOKENS, (run.id,), each.tokens)
            if each.last_ingest_us is not None:
                scrape.add(families.LAST_INGEST, (run.id,), each.last_ingest_us / 1e6)
            if run.seen_at_us is not None:
                scrape.add(families.LAST_SEEN, (run.id,), run.seen_at_us / 1e6)
            if run.id in steps:
                step = steps[run.id]
                scrape.add(families.STEP, (run.id,), step.step)
                scrape.add(families.STEP_SHARDS, (run.id,), step.received_shards)
                scrape.add(families.STEP_EXPECTED_SHARDS, (run.id,), step.expected_shards)
        return runs

    def _measurements(self, session: Session, scrape: _Scrape, run_ids: list[str]) -> None:
        keys = repository.newest_comparisons(session, run_ids)
        columns = [*families.OF_COMPARISONS, *families.OF_STEPS]
        for key, row in repository.values_of(session, keys, columns).items():
            run_id, _, _, comparison = key
            if comparison == STEP_ROW:
                for column, family in families.OF_STEPS.items():
                    scrape.add(family, (run_id,), getattr(row, column))
                continue
            for column, family in families.OF_COMPARISONS.items():
                scrape.add(family, (run_id, comparison), getattr(row, column))
            if comparison == TRAINER_ROLLOUT:
                table = self._buckets.get(session, key, row.computed_at_us)
                if table is not None:
                    _bucket_samples(scrape, run_id, table)

    def _probes(self, session: Session, scrape: _Scrape) -> None:
        now = database_now_us(session)
        for accelerator, state, count, oldest_us in repository.jobs_by_state(session, self._project):
            scrape.add(families.JOBS, (accelerator, state), count)
            if repository.is_waiting(state):
                scrape.add(families.OLDEST_WAITING, (accelerator,), max(0, now - oldest_us) / 1e6)
        for accelerator, count in repository.failures_by_accelerator(session, self._project).items():
            scrape.add(families.JOB_FAILURES, (accelerator,), count)
        for accelerator, count in count_live_workers(session, self._project, now).items():
            scrape.add(families.WORKERS, (accelerator,), count)


class _Scrape:
    """The samples of one scrape, by family."""

    def __init__(self) -> None:
        self._samples: dict[str, Samples] = {}

    def add(self, family: Family, labels: tuple[str, ...], value: float | None) -> None:
        """Add a sample; None and values that are not finite are left out."""
        if value is None or not math.isfinite(value):
            return
        if family.name not in self._samples:
            self._samples[family.name] = family.samples()
        self._samples[family.name].add_metric(labels, value)

    def families(self) -> list[Samples]:
        """Return the families that have samples, in the order of `families.FAMILIES`."""
        return [self._samples[family.name] for family in families.FAMILIES if family.name in self._samples]


def _bucket_samples(scrape: _Scrape, run_id: str, table: BucketTable) -> None:
    for index, (low, high) in enumerate(zip(table.edges[:-1], table.edges[1:], strict=True)):
        labels = (run_id, TRAINER_ROLLOUT, f"{low:.3g}-{high:.3g}")
        scrape.add(families.BUCKET_TOKENS, labels, float(table.tokens[index]))
        scrape.add(families.BUCKET_K3, labels, float(table.k3_kl[index]))


def _attributions(scrape: _Scrape, attributions: Iterable[Attribution]) -> None:
    for each in attributions:
        document: dict[str, Any] | None = each.document
        if document is None:
            continue
        scrape.add(families.ATTRIBUTED_STEP, (each.run_id,), each.step)
        for link in document["links"]:
            scrape.add(families.LINK_SHARE, (each.run_id, link["name"]), link["share"])
            scrape.add(families.LINK_K3, (each.run_id, link["name"]), link["k3_kl"])


def _advice(session: Session, scrape: _Scrape, runs: list[ActiveRun]) -> None:
    run_ids = [each.run.id for each in runs]
    states = states_of_runs(session, run_ids)
    acknowledged = repository.newest_acknowledgements(session, run_ids)
    for run in (each.run for each in runs):
        state = states[run.id]
        for mode in ("shadow", "apply"):
            scrape.add(families.ADVICE_MODE, (run.id, mode), 1 if run.advice_mode == mode else 0)
        scrape.add(families.ADVICE_REVISION, (run.id,), state.revision)
        scrape.add(families.ADVISED_SCALE, (run.id,), state.scale((run.last_step or 0) + 1))
        newest = acknowledged.get(run.id)
        if newest is None:
            continue
        scrape.add(families.ADVICE_ACKNOWLEDGED, (run.id,), newest.revision)
        scale = newest.applied_scale
        if scale is None and run.initial_learning_rate:
            scale = newest.applied_learning_rate / run.initial_learning_rate
        if scale is not None:
            scrape.add(families.APPLIED_SCALE, (run.id,), scale)
