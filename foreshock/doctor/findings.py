"""The text of the doctor's report: findings, variants that were tried and are no cause, and those not tried."""

import math
from collections.abc import Mapping
from typing import Any

from foreshock.api.doctor import DoctorReport, DoctorStepRecord, Finding, SideReport
from foreshock.api.records import parse
from foreshock.diagnosis.wording import as_sentence, interval_of_share, number, percent, plural

SIDE_WORDS = {"rollout": "the engine's logged log-probs (μ)", "trainer": "the trainer's logged log-probs (π)"}


def report_lines(report: DoctorReport) -> list[str]:
    """Return the report as text."""
    found = [f"{plural(report.rollouts, 'rollout')}, {plural(report.tokens, 'token')}; {report.ended}."]
    for finding in report.findings:
        found += ["", f"{finding.kind}: {finding.sentence}", *_details(finding)]
    found += ["", *(_on_side(side) for side in report.sides)]
    if report.ruled_out:
        found.append(tried_in_words(report))
    found += [f"not tried: {each.variant}: {each.why}" for each in report.not_tried]
    found.append(f"price: {plural(report.replays, 'replay')}, {report.seconds:.1f} s.")
    return found


def tried_in_words(report: DoctorReport) -> str:
    """Return how many variants were tried and not named, and those that explain most.

    One of them may be the cause all the same, if something else hides it.
    """
    best = ", ".join(f"{each.variant} ({percent(each.share)})" for each in report.ruled_out[:6])
    return f"tried and not named: {plural(len(report.ruled_out), 'variant')}; those that explain most: {best}."


def explained(finding: Finding) -> str:
    """Return how much a finding explains, with its interval; empty if that was not measured."""
    if math.isnan(finding.share):
        return ""
    interval = interval_of_share(finding.share_low, finding.share_high)
    how = "as exactly as other batches" if finding.exact else "within ordinary rounding"
    return (
        f"explains {100 * finding.share:.1f} % ({interval}): E[d²]/2 {number(finding.before)} before, "
        f"{number(finding.after)} after, {how}"
    )


def fix_of(finding: Finding) -> str:
    """Return what to do about a cause: the fix for any framework, else those of each; empty if none is known."""
    named = "; ".join(f"{framework}: {fix}" for framework, fix in finding.fixes.items() if framework != "any")
    general = finding.fixes.get("any", "")
    return as_sentence(general) if general else named and f"Set {named}."


def lines_of_answer(answer: Mapping[str, Any], probe: Mapping[str, Any]) -> list[str]:
    """Return the lines of an answer of the service, for `foreshock probe`."""
    return ["", *record_lines(parse(DoctorStepRecord, answer))]


def record_lines(record: DoctorStepRecord) -> list[str]:
    """Return the service's report on a step as text, with the results of checksums of the engines' weights."""
    return report_lines(record.report) + [f"checksums: {each}" for each in record.checksums]


def lines_of_differences(reports: Mapping[str, DoctorReport]) -> list[str]:
    """Return what differs between the reports of two runs, by title: findings of one only, and sizes by side."""
    (mine, one), (theirs, other) = reports.items()
    lines = [f"what differs between {mine} and {theirs}:"]
    for title, report, against in ((mine, one, other), (theirs, other, one)):
        known = {(each.side, each.cause, each.value) for each in against.findings}
        lines += [
            f"  only in {title}: {'; '.join(filter(None, (each.sentence, explained(each))))}"
            for each in report.findings
            if each.kind != "expected" and (each.side, each.cause, each.value) not in known
        ]
    if len(lines) == 1:
        lines.append("  no cause: the doctor finds the same in both")
    sides = {title: {each.side: each for each in report.sides} for title, report in reports.items()}
    for side in (each for each in SIDE_WORDS if all(each in of_run for of_run in sides.values())):
        sizes = " and ".join(
            f"{number(of_run[side].before)} in {title} (ordinary rounding {number(of_run[side].rounding)})"
            for title, of_run in sides.items()
        )
        lines.append(f"  {SIDE_WORDS[side]} differ from a replay of the announced weights by E[d²]/2 {sizes}")
    return lines


def _details(finding: Finding) -> list[str]:
    found = [f"  {line}"] if (line := explained(finding)) else []
    if finding.alternatives:
        found.append(f"  cannot be told from: {'; '.join(finding.alternatives)}")
    found += [f"  fix ({framework}): {fix}" for framework, fix in finding.fixes.items()]
    return found + ([f"  confirm: {finding.confirm}"] if finding.confirm else [])


def _on_side(side: SideReport) -> str:
    article = "an" if side.precision[:1] in "aeiou" else "a"
    return (
        f"{SIDE_WORDS[side.side]} against {article} {side.precision} replay: E[d²]/2 {number(side.before)}, "
        f"{number(side.after)} after the findings; noise of other batches {number(side.noise)}, "
        f"ordinary rounding {number(side.rounding)}."
    )
