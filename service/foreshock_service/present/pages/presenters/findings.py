"""What the lint and the doctor found at a step or in a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foreshock import probe_kinds
from foreshock.api.doctor import DoctorStepRecord
from foreshock.api.probes import ProbeRecord
from foreshock.api.steps import CheckRecord, LintWarningRecord, RunWarningRecord
from foreshock.diagnosis.wording import as_sentence, plural
from foreshock.doctor.findings import tried_in_words
from foreshock.lint import CHECKS
from foreshock_service.platform import security
from foreshock_service.platform.database.engine import of_step
from foreshock_service.platform.database.tables import Checkpoint, ProbeResult
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.replay.probes.service import list_probes
from foreshock_service.replay.results import documents
from foreshock_service.runs import events, lint

_NOT_CHECKED = "Semantics: not checked."


@dataclass(frozen=True, slots=True)
class LintPanel:
    """The result of the semantics lint; empty if every check was made and passed. `of_steps`: it is of a whole run.

    `ignored` says which values at masked tokens were left out.
    """

    checks: int
    warnings: Sequence[LintWarningRecord] = ()
    not_checked: Sequence[CheckRecord] = ()
    note: str | None = None
    ignored: str = ""
    of_steps: Sequence[RunWarningRecord] = ()
    checked_steps: int = 0
    run_address: str = ""


def lint_of_step(viewing: Viewing, run_id: str, step: int, attempt: int) -> LintPanel:
    try:
        found = lint.read_step(viewing.session, viewing.principal, run_id, step, attempt)
    except lint.LintNotFound:
        return LintPanel(len(CHECKS), note=_NOT_CHECKED)
    note = None
    if found.coverage is not None and found.coverage.rests_on != "all tokens":
        note = f"Semantics: checked on {found.coverage.text}."
    placeholders = (each for each in found.checks if each.name == "placeholder_log_probs" and each.state == "clean")
    return LintPanel(
        len(found.checks),
        found.warnings,
        [check for check in found.checks if check.state == "not checked"],
        note,
        next((each.why for each in placeholders), ""),
    )


def lint_of_run(viewing: Viewing, run_id: str, last_step: int | None, run_address: str) -> LintPanel:
    """Return the lint of a run's steps; the steps' own pages show the checks that could not be made."""
    found = lint.read_run(viewing.session, viewing.principal, run_id, None)
    whole = () if found.whole_run is None else (found.whole_run,)
    return LintPanel(
        len(CHECKS),
        (*whole, *found.window),
        note=_NOT_CHECKED if last_step is not None and not found.checked_steps else None,
        of_steps=found.warnings,
        checked_steps=found.checked_steps,
        run_address=run_address,
    )


_MOST_PROBES = 50
_MOST_NOT_TRIED = 5


def doctor_of_step(viewing: Viewing, key: events.StepKey) -> dict[str, Any]:
    """Return the newest report on a step, the state of an unfinished examination, and whether one is possible."""
    probes = list_probes(viewing.session, viewing.principal, key.run_id, key.step, None, _MOST_PROBES).items
    asked = next(
        (each for each in probes if each.kind == probe_kinds.DOCTOR.name and each.attempt == key.attempt), None
    )
    can_ask = viewing.session.get(Checkpoint, tuple(key)) is not None and (asked is None or asked.state != "running")
    may_ask = can_ask and viewing.principal.may(security.Scope.INGEST)
    action = f"/runs/{key.run_id}/steps/{key.step}/doctor" if may_ask else None
    record = documents.newest_report(viewing.session, of_step(ProbeResult, key))
    return _panel(record, key.step, _examination_in_words(asked), action, is_possible=can_ask or asked is not None)


def doctor_of_run(viewing: Viewing, run_id: str) -> dict[str, Any] | None:
    found = documents.newest_report(viewing.session, ProbeResult.run_id == run_id)
    return _panel(found, found.step, "", None) if found is not None else None


def _panel(
    record: DoctorStepRecord | None, step: int, state: str, action: str | None, *, is_possible: bool = True
) -> dict[str, Any]:
    """Return a report as a page shows it: found, tried and not named, not tried, and what would come next.

    `state`: that of an unfinished examination. `action`: the address of the form that requests one; None: not allowed
    or one is running. `is_possible`: the step has weights.
    """
    panel = {"step": step, "findings": (), "notes": (), "state": state, "action": action, "is_possible": is_possible}
    if record is None:
        return panel
    report = record.report
    notes = [f"Checksums: {each}" for each in record.checksums]
    notes += [as_sentence(tried_in_words(report))] if report.ruled_out else []
    notes += [f"Not tried: {each.variant}: {each.why}." for each in report.not_tried[:_MOST_NOT_TRIED]]
    more = len(report.not_tried) - _MOST_NOT_TRIED
    notes += [f"{plural(more, 'more variant')} could not be tried."] if more > 0 else []
    notes.append(f"Price: {plural(report.replays, 'replay')}, {report.seconds:.1f} s; {report.ended}.")
    return panel | {"findings": report.findings, "notes": notes}


def _examination_in_words(asked: ProbeRecord | None) -> str:
    """Return the progress of an examination; empty if it is done or was not requested."""
    if asked is None or asked.state == "done":
        return ""
    doing = asked.reason or next((job.doing for job in asked.jobs if job.state == "running" and job.doing), "")
    return f"The examination is {asked.state}{f': {doing}' if doing else ''}."
