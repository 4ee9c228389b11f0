"""Purge the tokens that the rules of retention do not keep. Aggregates, curves and rollout summaries stay for ever.

A step is purged in one short transaction that checks again that nothing waits for its tokens; its files are removed
after the grace. So it may run beside the service, twice at once, and may be interrupted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial

from sqlalchemy.orm import Session

from foreshock.api.runs import RetentionRecord
from foreshock.clock import now_us
from foreshock_service.maintenance.retention import repository
from foreshock_service.maintenance.retention.repository import RunRow
from foreshock_service.maintenance.retention.rules import RetentionRules, purged_steps
from foreshock_service.maintenance.retention.schemas import RetentionRulesBody
from foreshock_service.platform.audit import record
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.security import Principal
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.removals import give_up_files
from foreshock_service.runs.runs.service import get_run, lock_run, lock_run_for_background
from foreshock_service.runs.step_key import StepKey

_STEPS_AT_ONCE = 1_000
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RunReport:
    """What was purged of a run, or would be."""

    run: RunRow
    rules: RetentionRules
    steps: int = 0
    files: int = 0
    file_bytes: int = 0
    first_step: int | None = field(default=None)
    last_step: int | None = field(default=None)

    def count(self, key: StepKey, files: list[tuple[str, int]]) -> None:
        """Count a step with these files, given as (name, bytes)."""
        self.steps += 1
        self.files += len(files)
        self.file_bytes += sum(size for _, size in files)
        self.first_step = key.step if self.first_step is None else min(self.first_step, key.step)
        self.last_step = key.step if self.last_step is None else max(self.last_step, key.step)


def rules_of(settings: Settings, run: RunRow) -> RetentionRules:
    """Return the rules of a run: its own, else those of the settings."""
    if run.retention is not None:
        return RetentionRules(**run.retention)
    return RetentionRules(settings.retention_last_steps, settings.retention_every_steps, settings.retention_alert_steps)


def read_rules(session: Session, settings: Settings, principal: Principal, run_id: str) -> RetentionRecord:
    """Return the rules of a run. Raises RunNotFound, RunDeleted."""
    run = get_run(session, principal, run_id)
    rules = rules_of(settings, RunRow(run.id, run.project, run.key, run.retention))
    return RetentionRecord(**asdict(rules), source="settings" if run.retention is None else "run")


def set_rules(session: Session, principal: Principal, run_id: str, rules: RetentionRulesBody | None) -> None:
    """Set the run's own rules, or remove them. Raises RunNotFound, RunDeleted."""
    run = lock_run(session, principal, run_id)
    before = run.retention
    run.retention = None if rules is None else rules.model_dump()
    run.updated_at_us = now_us()
    action = "retention.set" if rules is not None else "retention.remove"
    record(session, principal, action, run.id, project=run.project, run_id=run.id, before=before, after=run.retention)


def purge(
    context: ServiceContext,
    run_id: str | None = None,
    *,
    dry_run: bool = False,
    go_on: Callable[[], bool] = lambda: True,
) -> Iterator[RunReport]:
    """Purge all runs or one of them, and yield a report for each with rules; with `dry_run` change nothing."""
    with context.database.read() as session:
        runs = repository.runs(session, run_id)
    for run in runs:
        rules = rules_of(context.settings, run)
        if rules.last_steps is not None:
            yield _purge_run(context, run, rules, dry_run, go_on)


class RetentionTask:
    """The periodic purge: at the first call, then once in FORESHOCK_RETENTION_INTERVAL_SECONDS."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._due = 0.0

    def run_if_due(self, go_on: Callable[[], bool] = lambda: True) -> int:
        """Purge every run if the interval is over; return the number of purged steps."""
        if time.monotonic() < self._due:
            return 0
        self._due = time.monotonic() + self._context.settings.retention_interval_seconds
        steps = 0
        for report in purge(self._context, go_on=go_on):
            if report.steps:
                _logger.info(
                    "retention: purged the tokens of %d steps of run %s, %d files of %.1f MB",
                    *(report.steps, report.run.id, report.files, report.file_bytes / 1e6),
                )
            steps += report.steps
        return steps


def _purge_run(
    context: ServiceContext, run: RunRow, rules: RetentionRules, dry_run: bool, go_on: Callable[[], bool]
) -> RunReport:
    report = RunReport(run, rules)
    with context.database.read() as session:
        newest = repository.newest_step(session, run.id)
        alerts = repository.alert_steps(session, run.id)
    if newest is None or rules.last_steps is None:
        return report
    after, steps = (0, -1), [StepKey(run.id, 0, -1)]
    while steps and go_on():
        with context.database.read() as session:
            steps = repository.settled_steps(session, run.id, newest - rules.last_steps, after, _STEPS_AT_ONCE)
            chosen = set(purged_steps({key.step for key in steps}, newest, alerts, rules))
            found = [(key, repository.files_of_step(session, key)) for key in steps if key.step in chosen]
        for key, files in found:
            if not go_on():
                break
            if dry_run or context.database.write(partial(_purge_step, context, key, files)):
                report.count(key, files)
        after = (steps[-1].attempt, steps[-1].step) if steps else after
    return report


def _purge_step(context: ServiceContext, key: StepKey, files: list[tuple[str, int]], session: Session) -> bool:
    """Purge a step in this transaction; False if something waits for its tokens now, or its files are others."""
    if lock_run_for_background(session, key.run_id) is None or not repository.is_settled(session, key):
        return False
    if repository.files_of_step(session, key) != files:
        return False
    give_up_files(session, files, "retention", context.settings.removal_grace_seconds)
    repository.mark_purged(session, key, now_us())
    return True
