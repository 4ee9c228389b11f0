"""`foreshock retention` on the database and the token store that the settings name."""

from __future__ import annotations

from foreshock.errors import ConfigurationError
from foreshock_service.maintenance.context import maintenance_context
from foreshock_service.maintenance.retention.rules import RetentionRules
from foreshock_service.maintenance.retention.service import purge
from foreshock_service.maintenance.run_names import run_called
from foreshock_service.platform.settings import load_settings


def retention(run: str | None, *, dry_run: bool) -> None:
    """Purge the tokens that the rules do not keep, and print what was purged of each run, or would be."""
    settings = load_settings()
    with maintenance_context(settings) as context:
        run_id = None
        if run is not None:
            with context.database.read() as session:
                run_id = run_called(session, run).id
        steps = size = reported = 0
        for report in purge(context, run_id, dry_run=dry_run):
            reported += 1
            steps, size = steps + report.steps, size + report.file_bytes
            span = f" ({report.first_step} to {report.last_step})" if report.steps else ""
            print(
                f"{report.run.id}\t{report.run.project}/{report.run.key}\t{report.steps} steps{span}\t"
                f"{report.files} files\t{report.file_bytes / 1e6:,.1f} MB\tkept: {_in_words(report.rules)}"
            )
        if not reported:
            raise ConfigurationError(
                "no rule says which tokens to keep: set FORESHOCK_RETENTION_LAST_STEPS, or the `retention` of a run"
            )
        if dry_run:
            print(f"the tokens of {steps} steps would be purged, {size / 1e6:,.1f} MB; nothing was changed")
        else:
            hours = settings.removal_grace_seconds / 3600
            print(f"the tokens of {steps} steps are purged; {size / 1e6:,.1f} MB are freed after {hours:g} h")


def _in_words(rules: RetentionRules) -> str:
    every = f", each {rules.every_steps}th" if rules.every_steps is not None else ""
    return f"the last {rules.last_steps}{every}, {rules.alert_steps} before and after alerts"
