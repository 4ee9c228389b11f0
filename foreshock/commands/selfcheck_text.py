"""Text of `foreshock selfcheck`: each warning once with its steps, then the checks that were not possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foreshock.commands.text import Paint, count, wrap
from foreshock.lint import LintEvidence, LintReport, LintWarning
from foreshock.severity import severity_rank

__all__ = ["CheckedStep", "render"]

_INDENT = " " * 8


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """A linted step: its files, evidence and report."""

    step: int
    files: tuple[str, ...]
    evidence: LintEvidence
    report: LintReport


def render(steps: Sequence[CheckedStep], together: CheckedStep | None, paint: Paint) -> list[str]:
    """Return the lines of text; `together` adds the warnings that no single step has."""
    if not steps:
        return ["No file could be read."]
    lines: list[str] = []
    found = _by_name(steps)
    for name in sorted(found, key=lambda each: (severity_rank(found[each][0][1].severity), found[each][0][0].step)):
        lines += [*_warning(found[name][0][1], _at(found[name], steps), paint), ""]
    if together is not None:
        for warning in together.report.warnings:
            if warning.name not in found:
                lines += [*_warning(warning, f"in all {len(steps)} steps together", paint), ""]
    return [*lines, *_summary(steps, together, paint)]


def _by_name(steps: Sequence[CheckedStep]) -> dict[str, list[tuple[CheckedStep, LintWarning]]]:
    """Return the steps of each warning, by name, ordered by step."""
    found: dict[str, list[tuple[CheckedStep, LintWarning]]] = {}
    for step in steps:
        for warning in step.report.warnings:
            found.setdefault(warning.name, []).append((step, warning))
    return found


def _at(found: Sequence[tuple[CheckedStep, LintWarning]], steps: Sequence[CheckedStep]) -> str:
    if len(steps) == 1:
        return ""
    first = found[0][0].step
    if len(found) == 1:
        return f"at step {first}"
    at = f"at {count(len(found))} of {count(len(steps))} steps, {first} to {found[-1][0].step}"
    return f"{at}; this is step {first}"


def _warning(warning: LintWarning, at: str, paint: Paint) -> Iterator[str]:
    head = f"{warning.severity:<8}  {warning.name}: {warning.title}" + (f" ({at})" if at else "")
    first, *rest = wrap(head, _INDENT, first=" ")
    yield paint(first, warning.severity)
    yield from rest
    yield from wrap(warning.seen, _INDENT)
    if warning.where:
        yield from wrap(f"Where: {'; '.join(map(str, warning.where))}", _INDENT)
    yield from wrap(f"To the measures: {warning.effect}", _INDENT)
    yield from wrap(f"What to do: {warning.remedy}", _INDENT)


def _summary(steps: Sequence[CheckedStep], together: CheckedStep | None, paint: Paint) -> Iterator[str]:
    """Yield the totals and the checks that were not possible; over all steps together if there are several."""
    of_all = (together or steps[0]).report
    clean = sum(step.report.is_clean for step in steps)
    left_out = _not_checked(steps, together)
    checks = len(of_all.checks)
    made = checks - sum(len(names) for names in left_out.values())
    result = "clean" if clean == len(steps) else f"{count(clean)} of them clean"
    if len(steps) == 1:
        result = "clean" if clean else _counted(len(of_all.warnings), "warning")
    totals = (_counted(len(steps), "step"), _counted(of_all.rollouts, "rollout"), _counted(of_all.tokens, "token"))
    of_checks = f"{made} checks" if made == checks else f"{made} of {checks} checks"
    yield paint(f"{', '.join(totals)}, {of_checks}: {result}.", "bold")
    for why, names in left_out.items():
        yield from wrap(f"not checked: {', '.join(names)}: {why}", _INDENT, first=" ")


def _counted(number: int, what: str) -> str:
    return f"{count(number)} {what if number == 1 else what + 's'}"


def _not_checked(steps: Sequence[CheckedStep], together: CheckedStep | None) -> dict[str, list[str]]:
    """Return the checks that neither a step nor all steps together allowed, by reason."""
    reports = [step.report for step in steps] + ([together.report] if together is not None else [])
    made = {check.name for report in reports for check in report.checks if check.state != "not checked"}
    found: dict[str, list[str]] = {}
    for check in (together or steps[0]).report.not_checked:
        if check.name not in made:
            found.setdefault(check.why, []).append(check.name)
    return found
