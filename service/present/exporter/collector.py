"""One scrape: a constant number of queries as Prometheus samples.

Nothing is counted in memory: every process exports the same, a restart resets nothing, and finished runs disappear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from sqlalchemy.orm import Session

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.measures.statistics.conditions import BUCKET_EDGES
from service.platform.context import ServiceContext
from service.platform.database.dialect import database_now_us
from service.platform.database.tables import Run
from service.platform.database.tables.probes import Attribution
from service.present.exporter import families, repository
from service.present.exporter.accelerators import Accelerators
from service.present.exporter.exposition import Scrape
from service.replay.workers.service import count_live_workers
from service.watch.advice.service import states_of_runs

_BUCKETS = [f"{low:.3g}-{high:.3g}" for low, high in pairwise(BUCKET_EDGES)]


class Collector:
    """Reads the service's database for one scrape; `project` None: the runs of every project."""

    def __init__(self, context: ServiceContext, version: str, project: str | None) -> None:
        self._context = context
        self._version = version
        self._project = project

    def collect(self) -> Scrape:
        """Read the database once and return every sample."""
        scrape = Scrape()
        with self._context.database.read() as session:
            scrape.add(families.BUILD_INFO, (self._version,), 1)
            runs = self._runs(session, scrape)
            run_ids = [run.id for run in runs]
            if run_ids:
                _measurements(session, scrape, run_ids)
                _attributions(scrape, repository.newest_attributions(session, run_ids).values())
                for run_id, rule, severity, count in repository.open_alerts(session, run_ids):
                    scrape.add(families.ALERTS_OPEN, (run_id, rule, severity), count)
                _advice(session, scrape, runs)
            self._probes(session, scrape)
        return scrape

    def _runs(self, session: Session, scrape: Scrape) -> Sequence[Run]:
        limit = self._context.settings.exporter_max_runs
        states = repository.runs_by_state(session, self._project)
        for state, count in states.items():
            scrape.add(families.RUNS, (state,), count)
        runs = repository.active_runs(session, self._project, limit)
        scrape.add(families.RUNS_EXPORTED, (), len(runs))
        scrape.add(families.RUNS_CUT, (), max(0, states.get("running", 0) - len(runs)))
        for run in runs:
            described = (run.project, run.key, run.name or "", run.model or "", run.model_kind or "")
            scrape.add(families.RUN_INFO, (run.id, *described), 1)
            scrape.add(families.ROLLOUTS, (run.id,), run.rollouts)
            scrape.add(families.TOKENS, (run.id,), run.tokens)
            if run.last_shard_at_us is not None:
                scrape.add(families.LAST_INGEST, (run.id,), run.last_shard_at_us / 1e6)
            if run.seen_at_us is not None:
                scrape.add(families.LAST_SEEN, (run.id,), run.seen_at_us / 1e6)
        for run_id, step, received, expected in repository.newest_closed_steps(session, [run.id for run in runs]):
            scrape.add(families.STEP, (run_id,), step)
            scrape.add(families.STEP_SHARDS, (run_id,), received)
            scrape.add(families.STEP_EXPECTED_SHARDS, (run_id,), expected)
        return runs

    def _probes(self, session: Session, scrape: Scrape) -> None:
        now = database_now_us(session)
        known = Accelerators(self._context.settings.exporter_accelerators)
        jobs: Counter[tuple[str, str]] = Counter()
        oldest: dict[str, int] = {}
        for accelerator, state, count, oldest_us in repository.jobs_by_state(session, self._project):
            label = known.label(accelerator)
            jobs[label, state] += count
            if repository.is_waiting(state):
                oldest[label] = min(oldest_us, oldest.get(label, oldest_us))
        for labels, count in jobs.items():
            scrape.add(families.JOBS, labels, count)
        for label, oldest_us in oldest.items():
            scrape.add(families.OLDEST_WAITING, (label,), max(0, now - oldest_us) / 1e6)
        failures = known.added(repository.failures_by_accelerator(session, self._project))
        for label, count in failures.items():
            scrape.add(families.JOB_FAILURES, (label,), count)
        for label, count in known.added(count_live_workers(session, self._project, now)).items():
            scrape.add(families.WORKERS, (label,), count)
        scrape.add(families.OTHER_ACCELERATORS, (), known.others)


def _measurements(session: Session, scrape: Scrape, run_ids: Sequence[str]) -> None:
    columns = [*families.OF_COMPARISONS, *families.OF_STEPS]
    first_of_steps = 3 + len(families.OF_COMPARISONS)
    for row in repository.newest_measurements(session, run_ids, columns):
        run_id, comparison, buckets = row[0], row[1], row[2]
        if comparison == STEP_ROW:
            for family, value in zip(families.OF_STEPS.values(), row[first_of_steps:], strict=True):
                scrape.add(family, (run_id,), value)
            continue
        for family, value in zip(families.OF_COMPARISONS.values(), row[3:first_of_steps], strict=True):
            scrape.add(family, (run_id, comparison), value)
        if comparison == TRAINER_ROLLOUT and buckets is not None:
            _bucket_samples(scrape, run_id, buckets)


def _bucket_samples(scrape: Scrape, run_id: str, buckets: bytes) -> None:
    values = np.frombuffer(buckets, dtype=np.float64)
    if values.size != 2 * len(_BUCKETS):
        # Of another release, with other edges; the next step replaces them.
        return
    tokens, k3 = values.reshape(2, -1).tolist()
    for bucket, count, mean in zip(_BUCKETS, tokens, k3, strict=True):
        labels = (run_id, TRAINER_ROLLOUT, bucket)
        scrape.add(families.BUCKET_TOKENS, labels, count)
        scrape.add(families.BUCKET_K3, labels, mean)


def _attributions(scrape: Scrape, attributions: Iterable[Attribution]) -> None:
    for each in attributions:
        document: dict[str, Any] | None = each.document
        if document is None:
            continue
        scrape.add(families.ATTRIBUTED_STEP, (each.run_id,), each.step)
        for link in document["links"]:
            scrape.add(families.LINK_SHARE, (each.run_id, link["name"]), link["share"])
            scrape.add(families.LINK_K3, (each.run_id, link["name"]), link["k3_kl"])


def _advice(session: Session, scrape: Scrape, runs: Sequence[Run]) -> None:
    run_ids = [run.id for run in runs]
    states = states_of_runs(session, run_ids)
    acknowledged = repository.newest_acknowledgements(session, run_ids)
    for run in runs:
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
