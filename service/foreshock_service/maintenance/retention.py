"""Purge the tokens that the settings do not keep. Aggregates, curves and rollout summaries stay for ever.

A step is purged in one short transaction that checks again that nothing waits for its tokens; its files are removed
after the grace. So it may run beside the service, twice at once, and may be interrupted.
"""

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from sqlalchemy import ColumnElement, and_, delete, exists, select, update
from sqlalchemy.orm import Session

from foreshock import clock, errors
from foreshock_service.maintenance.stored_files import maintenance_context, run_called
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database import engine, tables
from foreshock_service.platform.parameters import LARGEST_STEP
from foreshock_service.platform.settings import Settings, load_settings
from foreshock_service.platform.store.removal import give_up_files
from foreshock_service.replay.probes.jobs import ENDED
from foreshock_service.runs import events
from foreshock_service.runs.failing_runs import RunIsolated
from foreshock_service.runs.runs import lock_run_for_background

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RunReport:
    """The steps, files and bytes of a run that were purged, or would be."""

    run: tables.Run
    steps: int = 0
    files: int = 0
    file_bytes: int = 0
    first_step: int = LARGEST_STEP
    last_step: int = 0


def purge(
    context: ServiceContext,
    run_id: str | None = None,
    *,
    dry_run: bool = False,
    go_on: Callable[[], bool] = lambda: True,
) -> Iterator[RunReport]:
    """Purge all runs or one of them, and yield a report for each; with `dry_run` change nothing.

    Without FORESHOCK_RETENTION_LAST_STEPS all tokens are kept.
    """
    if context.settings.retention_last_steps is None:
        return
    with context.database.read() as session:
        query = select(tables.Run).where(tables.Run.deleted_at_us.is_(None))
        if run_id is not None:
            query = query.where(tables.Run.id == run_id)
        runs = session.scalars(query.order_by(tables.Run.created_at_us, tables.Run.id)).all()
    for run in runs:
        with RunIsolated(context.database, context.events, run.id, "purge the tokens that its settings do not keep"):
            report = RunReport(run)
            with context.database.read() as session:
                keys = _purgeable(session, context.settings, run.id)
            for key in itertools.takewhile(lambda _: go_on(), keys):
                if dry_run:
                    with context.database.read() as session:
                        files = _files_of_step(session, key)
                else:
                    files = context.database.write(partial(_purge_step, context, key))
                if files:
                    report.steps += 1
                    report.files += len(files)
                    report.file_bytes += sum(size for _, size in files)
                    report.first_step = min(report.first_step, key.step)
                    report.last_step = max(report.last_step, key.step)
            yield report


def purge_all(context: ServiceContext, go_on: Callable[[], bool] = lambda: True) -> int:
    """Purge every run, log what was purged, and return the number of steps."""
    steps = 0
    for report in purge(context, go_on=go_on):
        if report.steps:
            _logger.info(
                "retention: purged the tokens of %d steps of run %s, %d files of %.1f MB",
                *(report.steps, report.run.id, report.files, report.file_bytes / 1e6),
            )
        steps += report.steps
    return steps


def _purge_step(context: ServiceContext, key: events.StepKey, session: Session) -> list[tuple[str, int]]:
    """Purge a step in this transaction and return its files; none if something needs its tokens now."""
    of_step = (tables.Step.attempt == key.attempt, tables.Step.step == key.step)
    if lock_run_for_background(session, key.run_id) is None:
        return []
    if not _purgeable(session, context.settings, key.run_id, *of_step):
        return []
    files = _files_of_step(session, key)
    give_up_files(session, files, "retention", context.settings.removal_grace_seconds)
    # Its shards keep their rows.
    removed = {"tokens_purged_at_us": clock.now_us(), "full_rollouts": 0, "full_tokens": 0}
    whole = (engine.of_step(tables.Shard, key), tables.Shard.tokens_purged_at_us.is_(None))
    session.execute(update(tables.Shard).where(*whole).values(sampled_rollouts=0, **removed))
    session.execute(update(tables.Step).where(engine.of_step(tables.Step, key)).values(removed))
    session.execute(delete(tables.ScoreFile).where(_scores_of_step(key)))
    return files


def _purgeable(
    session: Session, settings: Settings, run_id: str, *of_step: ColumnElement[bool]
) -> list[events.StepKey]:
    """Return the steps of a run whose tokens are not kept, and for which nothing waits, in order.

    Kept are the newest steps, as many as the settings say, and so many steps before and after each alert that was not
    retracted. Open steps, those with shards to fold, unfinished jobs or an attribution to compute are left out. The
    newest step is that of the newest attempt with rollouts.
    """
    begun = and_(tables.Attempt.run_id == tables.Step.run_id, tables.Attempt.attempt == tables.Step.attempt)
    query = select(tables.Step.step).join(tables.Attempt, begun).where(tables.Step.run_id == run_id)
    newest = session.scalar(query.order_by(*tables.NEWEST_ATTEMPT_FIRST, tables.Step.step.desc()).limit(1))
    if newest is None:
        return []
    around = settings.retention_alert_steps
    alerted = exists().where(
        tables.Alert.run_id == run_id,
        tables.Alert.state != "retracted",
        tables.Alert.step.between(tables.Step.step - around, tables.Step.step + around),
    )
    probed = exists().where(
        engine.of_step(tables.Probe, tables.Step),
        tables.ProbeJob.probe_id == tables.Probe.id,
        tables.ProbeJob.state.not_in(sorted(ENDED)),
    )
    attributed = exists().where(engine.of_step(tables.Attribution, tables.Step), tables.Attribution.stale)
    steps = select(tables.Step.run_id, tables.Step.attempt, tables.Step.step).where(
        tables.Step.run_id == run_id,
        tables.Step.step <= newest - (settings.retention_last_steps or 0),
        tables.Step.closed_at_us.is_not(None),
        tables.Step.folded_shards >= tables.Step.received_shards,
        tables.Step.tokens_purged_at_us.is_(None),
        *(~alerted, ~probed, ~attributed, *of_step),
    )
    return [events.StepKey(*row) for row in session.execute(steps.order_by(tables.Step.attempt, tables.Step.step))]


def _files_of_step(session: Session, key: events.StepKey) -> list[tuple[str, int]]:
    """Return name and bytes of every file of a step: rollouts and scores."""
    own = select(tables.Shard.file, tables.Shard.file_bytes).where(
        engine.of_step(tables.Shard, key), tables.Shard.tokens_purged_at_us.is_(None)
    )
    of_jobs = select(tables.ScoreFile.file, tables.ScoreFile.body_bytes).where(_scores_of_step(key))
    return sorted({(name, size) for query in (own, of_jobs) for name, size in session.execute(query)})


def _scores_of_step(key: events.StepKey) -> ColumnElement[bool]:
    jobs = select(tables.ProbeJob.id).join(tables.Probe, tables.Probe.id == tables.ProbeJob.probe_id)
    return tables.ScoreFile.job_id.in_(jobs.where(engine.of_step(tables.Probe, key)))


def retention(run: str | None, *, dry_run: bool) -> None:
    """Purge the tokens that the settings do not keep, and print what was purged of each run, or would be."""
    settings = load_settings()
    if settings.retention_last_steps is None:
        raise errors.ConfigurationError("all tokens are kept: set FORESHOCK_RETENTION_LAST_STEPS")
    with maintenance_context(settings) as context:
        run_id = None
        if run is not None:
            with context.database.read() as session:
                run_id = run_called(session, run).id
        steps = size = 0
        for report in purge(context, run_id, dry_run=dry_run):
            steps, size = steps + report.steps, size + report.file_bytes
            span = f" ({report.first_step} to {report.last_step})" if report.steps else ""
            print(
                f"{report.run.id}\t{report.run.project}/{report.run.key}\t{report.steps} steps{span}\t"
                f"{report.files} files\t{report.file_bytes / 1e6:,.1f} MB"
            )
        if dry_run:
            print(f"the tokens of {steps} steps would be purged, {size / 1e6:,.1f} MB; nothing was changed")
        else:
            hours = settings.removal_grace_seconds / 3600
            print(f"the tokens of {steps} steps are purged; {size / 1e6:,.1f} MB are freed after {hours:g} h")
