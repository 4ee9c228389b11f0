"""The text of the doctor's report: findings, with what was ruled out and what could not be tried."""

import math
from collections.abc import Mapping
from typing import Any

from foreshock.api.doctor import DoctorReport, DoctorStepRecord, Finding, SideReport
from foreshock.api.records import parse
from foreshock.diagnosis.wording import as_sentence, interval_of_share, number, percent, plural

__all__ = ["SIDE_WORDS", "explained", "fix_of", "lines_of_answer", "report_lines", "ruled_out_in_words"]

SIDE_WORDS = {"rollout": "the engine's logged log-probs (μ)", "trainer": "the trainer's logged log-probs (π)"}


def report_lines(report: DoctorReport) -> list[str]:
    """Return the report as text."""
    found = [f"{plural(report.rollouts, 'rollout')}, {plural(report.tokens, 'token')}; {report.ended}."]
    for finding in report.findings:
        found += ["", f"{finding.kind}: {finding.sentence}", *_details(finding)]
    found += ["", *(_on_side(side) for side in report.sides)]
    if report.ruled_out:
        found.append(ruled_out_in_words(report))
    found += [f"not tried: {each.variant}: {each.why}" for each in report.not_tried]
    found.append(f"price: {plural(report.replays, 'replay')}, {report.seconds:.1f} s.")
    return found


def ruled_out_in_words(report: DoctorReport) -> str:
    """Return how many variants were ruled out, and those that explain most."""
    best = ", ".join(f"{each.variant} ({percent(each.share)})" for each in report.ruled_out[:6])
    return f"ruled out: {plural(len(report.ruled_out), 'variant')}; those that explain most: {best}."


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
    return ["", *report_lines(parse(DoctorStepRecord, answer).report)]


def _details(finding: Finding) -> list[str]:
    found = [f"  {line}"] if (line := explained(finding)) else []
    if finding.alternatives:
        found.append(f"  cannot be told from: {'; '.join(finding.alternatives)}")
    found += [f"  fix ({framework}): {fix}" for framework, fix in finding.fixes.items()]
    return found + ([f"  confirm: {finding.confirm}"] if finding.confirm else [])


def _on_side(side: SideReport) -> str:
    return (
        f"{SIDE_WORDS[side.side]} against a {side.precision} replay: E[d²]/2 {number(side.before)}, "
        f"{number(side.after)} after the findings; noise of other batches {number(side.noise)}, "
        f"ordinary rounding {number(side.rounding)}."
    )
