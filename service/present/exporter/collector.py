"""One scrape: a constant number of queries as Prometheus samples.

Nothing is counted in memory: every process exports the same, a restart resets nothing, and finished runs disappear.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from sqlalchemy.orm import Session

from foreshock.api.diagnosis import VERDICTS
from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.measures.statistics.conditions import BUCKET_EDGES
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.engine import database_now_us
from foreshock_service.platform.database.tables import Run, probes
from foreshock_service.present.exporter import families, repository
from foreshock_service.present.exporter.families import Scrape, label_text
from foreshock_service.replay.probes.workers import count_live_workers
from foreshock_service.runs.diagnoses import verdicts_of_runs
from foreshock_service.watch.advice.service import states_of_runs

_BUCKETS = [label_text(("bucket",), (f"{low:.3g}-{high:.3g}",)) for low, high in pairwise(BUCKET_EDGES)]
_MODES = {mode: label_text(("mode",), (mode,)) for mode in ("shadow", "apply")}
_OF_RUN = (families.ROLLOUTS, families.TOKENS, families.LAST_INGEST, families.LAST_SEEN)
_OF_NEWEST_STEP = (families.STEP, families.STEP_SHARDS, families.STEP_EXPECTED_SHARDS)
_OF_ADVICE = (families.ADVICE_REVISION, families.ADVISED_SCALE)
_OF_ACKNOWLEDGEMENT = (families.ADVICE_ACKNOWLEDGED, families.APPLIED_SCALE)


OTHER = "other"
# Label values of accelerators, since workers and probes name theirs freely: slugs of the names that drivers report
# (`foreshock.environment.device_slug`), and short names in use.
DECLARED = frozenset(
    f"""
    {repository.ANY_ACCELERATOR} {OTHER} cpu gaudi2 gaudi3 tpu
    a10 a100 b200 b300 gb200 gb300 h100 h200 h20 l4 l40s t4 v100 mi210 mi250x mi300x mi325x mi350x mi355x
    nvidia-a10 nvidia-a10g nvidia-a100-sxm4-40gb nvidia-a100-sxm4-80gb nvidia-a100-80gb-pcie nvidia-l4 nvidia-l40
    nvidia-l40s nvidia-h100-80gb-hbm3 nvidia-h100-pcie nvidia-h100-nvl nvidia-h20 nvidia-h200 nvidia-h800 nvidia-b200
    nvidia-b300 nvidia-gb200 nvidia-gb300 nvidia-gh200-480gb nvidia-rtx-a6000 nvidia-rtx-6000-ada-generation
    nvidia-geforce-rtx-3090 nvidia-geforce-rtx-4090 nvidia-geforce-rtx-5090 tesla-t4 tesla-v100-sxm2-32gb
    """.split()
)


class Accelerators:
    """The labels of one scrape: a declared name is its own label, any other is `other` and counted."""

    def __init__(self, further: str) -> None:
        self._declared = DECLARED | {name.strip() for name in further.split(",")}
        self._others: set[str] = set()

    def label(self, accelerator: str) -> str:
        """Return the label of an accelerator."""
        if accelerator in self._declared:
            return accelerator
        self._others.add(accelerator)
        return OTHER

    def added(self, counts: Mapping[str, int]) -> Mapping[str, int]:
        """Return counts by label."""
        labelled: Counter[str] = Counter()
        for accelerator, count in counts.items():
            labelled[self.label(accelerator)] += count
        return labelled

    @property
    def others(self) -> int:
        """Number of names that became `other`."""
        return len(self._others)


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
            scrape.add(families.BUILD_INFO, (self._version, self._context.settings.page_root), 1)
            runs = self._runs(session, scrape)
            run_ids = [run.id for run in runs]
            if run_ids:
                _measurements(session, scrape, run_ids)
                _attributions(scrape, repository.newest_attributions(session, run_ids).values())
                for run_id, rule, severity, count in repository.open_alerts(session, run_ids):
                    scrape.add(families.ALERTS_OPEN, (run_id, rule, severity), count)
                fallen = repository.runs_with_open_rule(session, run_ids, "reward_collapse")
                for run_id, said in verdicts_of_runs(session, run_ids).items():
                    for verdict in VERDICTS:
                        scrape.add(families.VERDICT, (run_id, verdict), said.verdict == verdict)
                    scrape.add(families.REWARD_COLLAPSED, (run_id,), run_id in fallen)
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
            received, seen = run.last_shard_at_us, run.seen_at_us
            times = [None if time_us is None else time_us / 1e6 for time_us in (received, seen)]
            scrape.add_row(_OF_RUN, label_text(("run",), (run.id,)), [run.rollouts, run.tokens, *times])
        for run_id, *counts in repository.newest_closed_steps(session, [run.id for run in runs]):
            scrape.add_row(_OF_NEWEST_STEP, label_text(("run",), (run_id,)), counts)
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
    of_comparisons, of_steps = tuple(families.OF_COMPARISONS.values()), tuple(families.OF_STEPS.values())
    for row in repository.newest_measurements(session, run_ids, columns):
        run_id, comparison, buckets = row[0], row[1], row[2]
        if comparison == STEP_ROW:
            scrape.add_row(of_steps, label_text(("run",), (run_id,)), row[first_of_steps:])
            continue
        labels = label_text(("run", "comparison"), (run_id, comparison))
        scrape.add_row(of_comparisons, labels, row[3:first_of_steps])
        if comparison == TRAINER_ROLLOUT and buckets is not None:
            _bucket_samples(scrape, labels, buckets)


def _bucket_samples(scrape: Scrape, labels: str, buckets: bytes) -> None:
    values = np.frombuffer(buckets, dtype=np.float64)
    if values.size != 2 * len(_BUCKETS):
        # Of another release, with other edges; the next step replaces them.
        return
    labelled = [f"{labels},{bucket}" for bucket in _BUCKETS]
    for family, column in zip((families.BUCKET_TOKENS, families.BUCKET_K3), values.reshape(2, -1), strict=True):
        scrape.add_column(family, labelled, column.tolist())


def _attributions(scrape: Scrape, attributions: Iterable[probes.Attribution]) -> None:
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
        of_run = label_text(("run",), (run.id,))
        for mode, of_mode in _MODES.items():
            value = 1 if run.advice_mode == mode else 0
            scrape.add_row((families.ADVICE_MODE,), f"{of_run},{of_mode}", (value,))
        advised = state.scale((run.last_step or 0) + 1)
        scrape.add_row(_OF_ADVICE, of_run, (state.revision, advised))
        newest = acknowledged.get(run.id)
        if newest is None:
            continue
        scale = newest.applied_scale
        if scale is None and run.initial_learning_rate:
            scale = newest.applied_learning_rate / run.initial_learning_rate
        scrape.add_row(_OF_ACKNOWLEDGEMENT, of_run, (newest.revision, scale))
