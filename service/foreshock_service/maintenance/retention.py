"""Purge the tokens that the settings do not keep. Aggregates, curves and rollout summaries stay for ever.

A step is purged in one short transaction that checks again that nothing waits for its tokens; its files are removed
after the grace. So it may run beside the service, twice at once, and may be interrupted.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from sqlalchemy import and_, delete, exists, select, update
from sqlalchemy.orm import Session

from foreshock import clock, errors
from foreshock_service.maintenance.stored_files import jobs_of_step, maintenance_context, run_called, steps_beyond
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database import engine, tables
from foreshock_service.platform.settings import load_settings
from foreshock_service.platform.store.removal import give_up_files
from foreshock_service.replay.probes.jobs import ENDED
from foreshock_service.runs import events
from foreshock_service.runs.failing_runs import RunIsolated
from foreshock_service.runs.runs import lock_run_for_background


def purged_steps(steps: Iterable[int], newest: int, alerts: Iterable[int], last: int, around: int) -> list[int]:
    """Return the steps whose tokens are not kept, in their order, in a run whose newest step is `newest`.

    Kept are the newest `last` steps, and `around` steps before and after each alert.
    """
    near_alerts = {alert + offset for alert in alerts for offset in range(-around, around + 1)}
    return [step for step in steps if step <= newest - last and step not in near_alerts]


_STEPS_AT_ONCE = 1_000
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RunReport:
    """The steps, files and bytes of a run that were purged, or would be."""

    run: tables.Run
    steps: int = 0
    files: int = 0
    file_bytes: int = 0
    first_step: int | None = None
    last_step: int | None = None

    def count(self, key: events.StepKey, files: list[tuple[str, int]]) -> None:
        """Count a step with these files, given as (name, bytes)."""
        self.steps += 1
        self.files += len(files)
        self.file_bytes += sum(size for _, size in files)
        self.first_step = key.step if self.first_step is None else min(self.first_step, key.step)
        self.last_step = key.step if self.last_step is None else max(self.last_step, key.step)


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
    last = context.settings.retention_last_steps
    if last is None:
        return
    with context.database.read() as session:
        query = select(tables.Run).where(tables.Run.deleted_at_us.is_(None))
        if run_id is not None:
            query = query.where(tables.Run.id == run_id)
        runs = session.scalars(query.order_by(tables.Run.created_at_us, tables.Run.id)).all()
    for run in runs:
        with RunIsolated(context.database, context.events, run.id, "purge the tokens that its settings do not keep"):
            yield _purge_run(context, run, last, dry_run, go_on)


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


def _purge_run(
    context: ServiceContext, run: tables.Run, last: int, dry_run: bool, go_on: Callable[[], bool]
) -> RunReport:
    report = RunReport(run)
    with context.database.read() as session:
        newest = _newest_step(session, run.id)
        alerts = _alert_steps(session, run.id)
    if newest is None:
        return report
    after, around = (0, -1), context.settings.retention_alert_steps
    steps = [events.StepKey(run.id, 0, -1)]
    while steps and go_on():
        with context.database.read() as session:
            steps = _settled_steps(session, run.id, newest - last, after, _STEPS_AT_ONCE)
            chosen = set(purged_steps({key.step for key in steps}, newest, alerts, last, around))
            found = [(key, _files_of_step(session, key)) for key in steps if key.step in chosen]
        for key, files in found:
            if not go_on():
                break
            if dry_run or context.database.write(partial(_purge_step, context, key, files)):
                report.count(key, files)
        after = (steps[-1].attempt, steps[-1].step) if steps else after
    return report


def _purge_step(context: ServiceContext, key: events.StepKey, files: list[tuple[str, int]], session: Session) -> bool:
    """Purge a step in this transaction; False if something waits for its tokens now, or its files have changed."""
    if lock_run_for_background(session, key.run_id) is None:
        return False
    if key not in _settled_steps(session, key.run_id, key.step, (key.attempt, key.step - 1), 1):
        return False
    if _files_of_step(session, key) != files:
        return False
    give_up_files(session, files, "retention", context.settings.removal_grace_seconds)
    # Its shards keep their rows.
    now = clock.now_us()
    none_stored = {"full_rollouts": 0, "full_tokens": 0}
    whole = (engine.of_step(tables.Shard, key), tables.Shard.tokens_purged_at_us.is_(None))
    removed = {"tokens_purged_at_us": now, "sampled_rollouts": 0, **none_stored}
    session.execute(update(tables.Shard).where(*whole).values(removed))
    session.execute(
        update(tables.Step).where(engine.of_step(tables.Step, key)).values(tokens_purged_at_us=now, **none_stored)
    )
    session.execute(delete(tables.ScoreFile).where(tables.ScoreFile.job_id.in_(jobs_of_step(key))))
    return True


def _newest_step(session: Session, run_id: str) -> int | None:
    """Return the newest step of the run's active history: that of its newest attempt with rollouts."""
    begun = and_(tables.Attempt.run_id == tables.Step.run_id, tables.Attempt.attempt == tables.Step.attempt)
    query = select(tables.Step.step).join(tables.Attempt, begun).where(tables.Step.run_id == run_id)
    return session.scalar(query.order_by(*tables.NEWEST_ATTEMPT_FIRST, tables.Step.step.desc()).limit(1))


def _settled_steps(
    session: Session, run_id: str, up_to: int, after: tuple[int, int], limit: int
) -> list[events.StepKey]:
    """Return up to `limit` steps beyond `after` (attempt, step) that have tokens and wait for nothing.

    Open steps, those with shards to fold, unfinished jobs or an attribution to compute are left out.
    """
    probed = exists().where(
        engine.of_step(tables.Probe, tables.Step),
        tables.ProbeJob.probe_id == tables.Probe.id,
        tables.ProbeJob.state.not_in(sorted(ENDED)),
    )
    attributed = exists().where(engine.of_step(tables.Attribution, tables.Step), tables.Attribution.stale)
    return steps_beyond(
        session,
        run_id,
        after,
        limit,
        tables.Step.step <= up_to,
        tables.Step.closed_at_us.is_not(None),
        tables.Step.folded_shards >= tables.Step.received_shards,
        tables.Step.tokens_purged_at_us.is_(None),
        ~probed,
        ~attributed,
    )


def _alert_steps(session: Session, run_id: str) -> set[int]:
    """Return the steps at which alerts of the run fired, except retracted alerts."""
    query = select(tables.Alert.step).where(tables.Alert.run_id == run_id, tables.Alert.state != "retracted")
    return set(session.scalars(query.distinct()))


def _files_of_step(session: Session, key: events.StepKey) -> list[tuple[str, int]]:
    """Return name and bytes of every file of a step: rollouts and scores."""
    own = select(tables.Shard.file, tables.Shard.file_bytes).where(
        engine.of_step(tables.Shard, key), tables.Shard.tokens_purged_at_us.is_(None)
    )
    found = [(name, size) for name, size in session.execute(own)]
    scores = select(tables.ScoreFile.file, tables.ScoreFile.body_bytes)
    of_jobs = scores.where(tables.ScoreFile.job_id.in_(jobs_of_step(key)))
    found += [(name, size) for name, size in session.execute(of_jobs)]
    return sorted(set(found))


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
