"""The exporter: `/metrics`, Prometheus samples read with a constant number of queries.

Nothing is counted in memory: all processes export the same, a restart resets nothing, and finished runs disappear. The
format is the one that the scraper requests (Prometheus text, or OpenMetrics).
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from fastapi import Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from sqlalchemy import ColumnElement, and_, func, select
from sqlalchemy.orm import Session

from foreshock.api.diagnosis import VERDICTS
from foreshock.api.watch import STANDING
from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.diagnosis import lag_zero, quantities
from foreshock.diagnosis.lags import LAG_KEY
from foreshock.diagnosis.largest_token import LARGEST_TOKEN_KEYS, without_largest_token
from foreshock.measures.statistics.conditions import BUCKET_EDGES
from foreshock_service.platform import compression, parameters, security
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database import engine, tables
from foreshock_service.present.exporter import families
from foreshock_service.replay.probes.jobs import FAILURES, JobState
from foreshock_service.replay.probes.workers import count_live_workers, is_visible, jobs_by_state
from foreshock_service.runs import attempts, diagnoses, scalars
from foreshock_service.runs.failing_runs import read_runs
from foreshock_service.watch.advice.service import states_of_runs
from foreshock_service.watch.detection.states import newest_of_run, observed_steps


def newest_measurements(session: Session, run_ids: Collection[str], columns: Sequence[str]) -> Sequence[Any]:
    """Return (run_id, comparison, buckets, some columns of the wide table) of the newest step of each comparison.

    Long runs have thousands of steps, few of which were replayed; the table `newest_measurements` names those to read.
    """
    table, newest = tables.measurements.c, tables.NewestMeasurement
    same = and_(_of_shown(table, newest), table.comparison == newest.comparison)
    query = select(newest.run_id, newest.comparison, newest.buckets, *(table[name] for name in columns))
    query = query.select_from(newest).join(tables.measurements, same).where(newest.run_id.in_(run_ids))
    return session.execute(query.order_by(newest.run_id, newest.comparison)).all()


def _of_shown(table: Any, newest: Any) -> ColumnElement[bool]:
    same_step = (table.attempt == newest.shown_attempt, table.step == newest.shown_step)
    return and_(table.run_id == newest.run_id, *same_step)


def failures_by_accelerator(session: Session, project: str | None) -> Mapping[str, int]:
    """Return the number of tries that failed or whose lease expired, by the accelerator of the worker.

    Tries of runs that were deleted afterwards are included.
    """
    lease, of_deleted = tables.Lease, tables.RemovedFailures
    kept = (
        select(lease.accelerator, func.count())
        .join(tables.ProbeJob, tables.ProbeJob.id == lease.job_id)
        .join(tables.Probe)
        .join(tables.Run, tables.Run.id == tables.Probe.run_id)
        .where(lease.outcome.in_(FAILURES))
    )
    removed = select(of_deleted.accelerator, func.sum(of_deleted.tries))
    if project is not None:
        kept, removed = kept.where(tables.Run.project == project), removed.where(of_deleted.project == project)
    total: Counter[str] = Counter()
    for query, accelerator in ((kept, lease.accelerator), (removed, of_deleted.accelerator)):
        for name, tries in session.execute(query.group_by(accelerator)):
            total[name] += int(tries)
    return total


_BUCKETS = [f"{low:.3g}-{high:.3g}" for low, high in pairwise(BUCKET_EDGES)]
# Quantities that scalars may report in a run without rollouts: the metric of each, and its labels after the run.
_QUANTITIES: Mapping[str, tuple[Any, ...]] = {
    **{f"{STEP_ROW}:{column}": (family,) for column, family in families.OF_STEPS.items()},
    **{f"{TRAINER_ROLLOUT}:{name}": (family, TRAINER_ROLLOUT) for name, family in families.OF_COMPARISONS.items()},
}
# Columns, not exported themselves, that tell which tokens a healthy range applies to, and which token is left out.
_OF_LAGS = sorted(
    {*lag_zero.LAG_ZERO_COLUMNS, *(key.partition(":")[2] for key in LARGEST_TOKEN_KEYS)}
    - families.OF_COMPARISONS.keys()
)
# Labels of accelerators; further ones, by name, are `other`.
MOST_ACCELERATORS, OTHER = 50, "other"
_OF_RUN = (families.ROLLOUTS, families.TOKENS, families.LAST_INGEST, families.LAST_SEEN)
_OF_NEWEST_STEP = (families.STEP, families.STEP_SHARDS, families.STEP_EXPECTED_SHARDS)
_OF_ADVICE = (families.ADVICE_REVISION, families.ADVISED_SCALE)
_OF_ACKNOWLEDGEMENT = (families.ADVICE_ACKNOWLEDGED, families.APPLIED_SCALE)


def scrape(context: ServiceContext, version: str, project: str | None) -> families.Scrape:
    """Read the service's database once and return every sample; `project` None: runs of all projects."""
    found, settings = families.Scrape(), context.settings
    with context.database.read() as session:
        found.add(families.BUILD_INFO, (version, settings.page_root), 1)
        runs = {run.id: run for run in _runs(session, found, project, settings.exporter_max_runs)}
        for read in (_run_samples, _measurements, _attributions, _verdicts, _advice):
            for samples in read_runs(
                context, tuple(runs), partial(_samples_of, session, runs, read), "export its metrics"
            ):
                found.merge(samples)
        _probes(session, found, project)
    return found


def _samples_of(
    session: Session, runs: Mapping[str, tables.Run], read: Callable[..., None], run_ids: Sequence[str]
) -> families.Scrape:
    samples = families.Scrape()
    read(session, samples, {run_id: runs[run_id] for run_id in run_ids})
    return samples


def _runs(session: Session, scrape: families.Scrape, project: str | None, limit: int) -> Sequence[tables.Run]:
    by_state = select(tables.Run.state, func.count()).where(is_visible(project)).group_by(tables.Run.state)
    states: dict[str, int] = dict(session.execute(by_state).all())
    for state, count in states.items():
        scrape.add(families.RUNS, (state,), count)
    newest = func.coalesce(tables.Run.last_shard_at_us, tables.Run.created_at_us)
    running = select(tables.Run).where(is_visible(project), tables.Run.state == "running")
    runs = session.scalars(running.order_by(newest.desc(), tables.Run.id).limit(limit)).all()
    scrape.add(families.RUNS_EXPORTED, (), len(runs))
    scrape.add(families.RUNS_CUT, (), max(0, states.get("running", 0) - len(runs)))
    return runs


def _run_samples(session: Session, scrape: families.Scrape, runs: Mapping[str, tables.Run]) -> None:
    for run in runs.values():
        described = (run.project, run.key, run.name or "", run.model or "", run.model_kind or "")
        scrape.add(families.RUN_INFO, (run.id, *described), 1)
        received, seen = run.last_shard_at_us, run.seen_at_us
        times = [None if time_us is None else time_us / 1e6 for time_us in (received, seen)]
        scrape.add_row(_OF_RUN, (run.id,), [run.rollouts, run.tokens, *times])
    newest, step = tables.NewestMeasurement, tables.Step
    query = select(step.run_id, step.step, step.received_shards, step.expected_shards).select_from(newest)
    query = query.join(step, _of_shown(step, newest))
    query = query.where(newest.run_id.in_(runs), newest.comparison == STEP_ROW)
    for run_id, *counts in session.execute(query):
        scrape.add_row(_OF_NEWEST_STEP, (run_id,), counts)
    _scalars(session, scrape, {run.id: run for run in runs.values() if run.last_step is None})


def _verdicts(session: Session, scrape: families.Scrape, runs: Mapping[str, tables.Run]) -> None:
    fallen = _alerts(session, scrape, runs)
    for run_id, said in diagnoses.verdicts_of_runs(session, runs).items():
        for verdict in VERDICTS:
            scrape.add(families.VERDICT, (run_id, verdict), said.verdict == verdict)
        scrape.add(families.REWARD_COLLAPSED, (run_id,), run_id in fallen)


def _alerts(session: Session, scrape: families.Scrape, run_ids: Collection[str]) -> set[str]:
    """Add the open alerts; return the runs with an open or acknowledged alert of a collapse of the reward."""
    alert = tables.Alert
    group = (alert.run_id, alert.rule, alert.severity, alert.state)
    query = select(*group, func.count()).where(alert.run_id.in_(run_ids), alert.state.in_(STANDING))
    fallen = set()
    for run_id, rule, severity, state, count in session.execute(query.group_by(*group)):
        if state == "open":
            scrape.add(families.ALERTS_OPEN, (run_id, rule, severity), count)
        if rule == "reward_collapse":
            fallen.add(run_id)
    return fallen


def _probes(session: Session, scrape: families.Scrape, project: str | None) -> None:
    now = engine.database_now_us(session)
    queues, failures = jobs_by_state(session, project), failures_by_accelerator(session, project)
    workers = count_live_workers(session, project, now)
    # Workers and probes name accelerators freely.
    named = sorted({*(row[0] for row in queues), *failures, *workers})[:MOST_ACCELERATORS]
    jobs: Counter[tuple[str, str]] = Counter()
    of_accelerators: Counter[tuple[families.Family, str]] = Counter()
    oldest: dict[str, int] = {}
    for accelerator, state, count, oldest_us in queues:
        label = accelerator if accelerator in named else OTHER
        jobs[label, state] += count
        if state == JobState.QUEUED:
            oldest[label] = min(oldest_us, oldest.get(label, oldest_us))
    for family, counts in ((families.JOB_FAILURES, failures), (families.WORKERS, workers)):
        for accelerator, count in counts.items():
            of_accelerators[family, accelerator if accelerator in named else OTHER] += count
    for labels, count in jobs.items():
        scrape.add(families.JOBS, labels, count)
    for label, oldest_us in oldest.items():
        scrape.add(families.OLDEST_WAITING, (label,), max(0, now - oldest_us) / 1e6)
    for (family, label), count in of_accelerators.items():
        scrape.add(family, (label,), count)


def _measurements(session: Session, scrape: families.Scrape, runs: Mapping[str, tables.Run]) -> None:
    columns = [*families.OF_COMPARISONS, *_OF_LAGS, *families.OF_STEPS]
    end, first_of_steps = 3 + len(families.OF_COMPARISONS), 3 + len(columns) - len(families.OF_STEPS)
    of_comparisons, of_steps = tuple(families.OF_COMPARISONS.values()), tuple(families.OF_STEPS.values())
    rows = newest_measurements(session, runs, columns)
    lags = {row[0]: row.lag_mean for row in rows if row[1] == STEP_ROW}
    for row in rows:
        run_id, comparison, buckets = row[0], row[1], row[2]
        if comparison == STEP_ROW:
            scrape.add_row(of_steps, (run_id,), row[first_of_steps:])
            continue
        scrape.add_row(of_comparisons, (run_id, comparison), row[3:end])
        if comparison != TRAINER_ROLLOUT:
            continue
        known = zip(columns, row[3:first_of_steps], strict=False)
        values = {f"{comparison}:{column}": value for column, value in known} | {LAG_KEY: lags.get(run_id)}
        _at_lag_zero(scrape, run_id, values)
        if buckets is not None:
            _bucket_samples(scrape, run_id, comparison, buckets)


def _at_lag_zero(scrape: families.Scrape, run_id: str, values: Mapping[str, float | None]) -> None:
    """Add the values that healthy ranges judge, from a step's values by `comparison:measure`."""
    judged = without_largest_token({key: value for key, value in values.items() if value is not None})
    for measure, family in families.AT_LAG_ZERO.items():
        scrape.add(family, (run_id, TRAINER_ROLLOUT), lag_zero.at_lag_zero(measure, judged))


def _scalars(session: Session, scrape: families.Scrape, runs: Mapping[str, tables.Run]) -> None:
    """Add the newest step of runs without rollouts, and the measures that their trainers report as scalars."""
    for run_id, step in observed_steps(session, runs).items():
        scrape.add(families.STEP, (run_id,), step)
    run, seen, scalar = tables.Run, tables.DetectorSnapshot, tables.Scalar
    of_newest = and_(
        scalar.run_id == run.id, scalar.attempt == newest_of_run(seen.attempt), scalar.step == newest_of_run(seen.step)
    )
    query = select(scalar.run_id, scalar.source, scalar.name, scalar.value).select_from(run)
    rows = session.execute(query.join(scalar, of_newest).where(run.id.in_(runs)))
    for run_id, values in scalars.preferred(rows).items():
        found = quantities.quantities_of(values, runs[run_id].scalar_names or {}, _QUANTITIES)
        for quantity, (family, *further) in _QUANTITIES.items():
            scrape.add(family, (run_id, *further), found.get(quantity))
        _at_lag_zero(scrape, run_id, found)


def _bucket_samples(scrape: families.Scrape, run_id: str, comparison: str, buckets: bytes) -> None:
    values = np.frombuffer(buckets, dtype=np.float64)
    if values.size != 2 * len(_BUCKETS):
        # Buckets of another release have other edges; the next step replaces them.
        return
    for family, column in zip((families.BUCKET_TOKENS, families.BUCKET_K3), values.reshape(2, -1), strict=True):
        for bucket, value in zip(_BUCKETS, column.tolist(), strict=True):
            scrape.add(family, (run_id, comparison, bucket), value)


def _attributions(session: Session, scrape: families.Scrape, runs: Mapping[str, tables.Run]) -> None:
    table = tables.Attribution
    active = ~attempts.is_superseded(table.run_id, table.attempt, table.step)
    computed = (table.run_id.in_(runs), table.computed_at_us.is_not(None), active)
    newest = select(table.run_id, func.max(table.step).label("step")).where(*computed).group_by(table.run_id).subquery()
    same = and_(table.run_id == newest.c.run_id, table.step == newest.c.step)
    for each in session.scalars(select(table).join(newest, same).where(*computed)):
        if each.document is None:
            continue
        scrape.add(families.ATTRIBUTED_STEP, (each.run_id,), each.step)
        for link in each.document["links"]:
            scrape.add(families.LINK_SHARE, (each.run_id, link["name"]), link["share"])
            scrape.add(families.LINK_K3, (each.run_id, link["name"]), link["k3_kl"])


def _advice(session: Session, scrape: families.Scrape, runs: Mapping[str, tables.Run]) -> None:
    states = states_of_runs(session, runs)
    observed = observed_steps(session, [run.id for run in runs.values() if run.last_step is None])
    done, attempt = tables.AdviceAcknowledgement, tables.Attempt
    same = and_(done.run_id == attempt.run_id, done.attempt == attempt.attempt)
    last = select(done.step).where(same).order_by(done.step.desc()).limit(1).correlate(attempt).scalar_subquery()
    query = select(done).select_from(attempt).join(done, and_(same, done.step == last))
    query = query.where(attempt.run_id.in_(runs)).order_by(*tables.OLDEST_ATTEMPT_FIRST)
    acknowledged = {each.run_id: each for each in session.scalars(query)}
    for run in runs.values():
        for mode in ("shadow", "apply"):
            scrape.add(families.ADVICE_MODE, (run.id, mode), run.advice_mode == mode)
        newest_step = run.last_step if run.last_step is not None else observed.get(run.id, -1)
        state = states.get(run.id)
        if state is not None:
            scrape.add_row(_OF_ADVICE, (run.id,), (state.revision, state.scale(newest_step + 1)))
        newest = acknowledged.get(run.id)
        if newest is None:
            continue
        scale = newest.applied_scale
        if scale is None and run.initial_learning_rate:
            scale = newest.applied_learning_rate / run.initial_learning_rate
        scrape.add_row(_OF_ACKNOWLEDGEMENT, (run.id,), (newest.revision, scale))


router = parameters.api_router(tags=["metrics"])
_FORMATS = {
    "text/plain": {"schema": {"type": "string"}},
    "application/openmetrics-text": {"schema": {"type": "string"}},
}


@router.get("/metrics", response_class=Response, responses={200: {"content": _FORMATS}})
def metrics(request: Request, context: Context, principal: security.Reader) -> Response:
    """Return the newest measures of running runs, their advice and alerts, and the probes, for Prometheus."""
    # A registry of this scrape only, without metrics of the process or of another application.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(scrape(context, request.app.version, principal.project))
    if principal.project is None:
        registry.register(request.app.state.metrics)
    write, media_type = choose_encoder(request.headers.get("accept", ""))
    body, encoding = compression.compressed(write(registry), request.headers.get("accept-encoding"))
    return Response(body, media_type=media_type, headers={"Vary": "Accept, Accept-Encoding"} | encoding)
