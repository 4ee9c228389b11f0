"""What the doctor says of a step, and how far an examination is."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreshock.api.doctor import DoctorStepRecord, Finding
from foreshock.api.probes import ProbeRecord
from foreshock.diagnosis.wording import as_sentence, plural
from foreshock.doctor.findings import ruled_out_in_words
from foreshock.probe_kinds import DOCTOR
from foreshock_service.platform import keys
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.replay.probes.service import find_checkpoint, list_probes
from foreshock_service.replay.results import doctor
from foreshock_service.runs.events import StepKey

_MOST_PROBES = 50
_MOST_NOT_TRIED = 5


@dataclass(frozen=True, slots=True)
class DoctorPanel:
    """The doctor's newest report on `step`, and the state of one that is not done.

    `action`: where a form asks for an examination; None: nobody may, or one runs. `is_possible`: the step has weights.
    """

    step: int
    findings: Sequence[Finding]
    notes: Sequence[str]
    state: str
    action: str | None
    is_possible: bool


def doctor_of_step(viewing: Viewing, key: StepKey) -> DoctorPanel:
    """Return the newest report on a step, the state of an examination that is not done, and whether one can be."""
    probes = list_probes(viewing.session, viewing.principal, key.run_id, key.step, None, _MOST_PROBES).items
    asked = next((each for each in probes if each.kind == DOCTOR.name and each.attempt == key.attempt), None)
    found = doctor.KIND.newest(viewing.session, key, 1)
    can_ask = find_checkpoint(viewing.session, *key) is not None and (asked is None or asked.state != "running")
    may_ask = can_ask and viewing.principal.may(keys.Scope.INGEST)
    action = f"/runs/{key.run_id}/steps/{key.step}/doctor" if may_ask else None
    record = doctor.report_record(viewing.session, *found[0]) if found else None
    return panel(record, key.step, _state(asked), action, is_possible=can_ask or asked is not None)


def doctor_of_run(viewing: Viewing, run_id: str) -> DoctorPanel | None:
    """Return the newest report on any step of a run; None without one."""
    found = doctor.newest_of_run(viewing.session, run_id)
    return panel(found[0], found[0].step, "", None) if found else None


def panel(
    record: DoctorStepRecord | None, step: int, state: str, action: str | None, *, is_possible: bool = True
) -> DoctorPanel:
    """Return a report as a page shows it: found, ruled out, not tried, and what would come next."""
    if record is None:
        return DoctorPanel(step, (), (), state, action, is_possible)
    report = record.report
    notes = [f"Checksums: {each}" for each in record.checksums]
    notes += [as_sentence(ruled_out_in_words(report))] if report.ruled_out else []
    notes += [f"Not tried: {each.variant}: {each.why}." for each in report.not_tried[:_MOST_NOT_TRIED]]
    more = len(report.not_tried) - _MOST_NOT_TRIED
    notes += [f"{plural(more, 'more variant')} could not be tried."] if more > 0 else []
    notes.append(f"Price: {plural(report.replays, 'replay')}, {report.seconds:.1f} s; {report.ended}.")
    return DoctorPanel(step, report.findings, notes, state, action, is_possible)


def _state(asked: ProbeRecord | None) -> str:
    """Return how far an examination is; empty if it is done or was not asked for."""
    if asked is None or asked.state == "done":
        return ""
    doing = next((job.doing for job in asked.jobs if job.state == "running" and job.doing), "")
    return f"The examination is {asked.state}{f': {asked.reason or doing}' if asked.reason or doing else ''}."
