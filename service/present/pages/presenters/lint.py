"""The presenter of the semantics lint: warnings as cards, and the checks that could not be made."""

from __future__ import annotations

from foreshock.lint import CHECKS
from foreshock_service.present.pages.formatting import count
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.present.pages.view_models import LintCard, LintPanel
from foreshock_service.runs.lint.schemas import CheckRead, ExampleRead, RunWarningRead, StepLintRead, WarningRead
from foreshock_service.runs.lint.service import LintNotFound, read_run, read_step

_NOT_CHECKED = "Semantics: not checked."


def lint_of_step(viewing: Viewing, run_id: str, step: int, attempt: int) -> LintPanel:
    """Return the lint of a step."""
    try:
        found = read_step(viewing.session, viewing.principal, run_id, step, attempt)
    except LintNotFound:
        return LintPanel((), (), len(CHECKS), _NOT_CHECKED)
    return LintPanel(
        cards=[_card(warning) for warning in found.warnings],
        not_checked=[_words(check) for check in found.checks if check.state == "not checked"],
        checks=len(found.checks),
        note=_sample_note(found),
    )


def _sample_note(found: StepLintRead) -> str | None:
    """Return over how many rollouts the checks were made, if not over all."""
    if found.coverage is None or found.coverage.rests_on == "all tokens":
        return None
    return f"Semantics: checked on {found.coverage.text}."


def lint_of_run(viewing: Viewing, run_id: str, last_step: int | None, run_address: str) -> LintPanel:
    """Return the lint of a run's steps; the checks that could not be made are on the steps' pages."""
    found = read_run(viewing.session, viewing.principal, run_id, None)
    cards = [_card_of_steps(run_address, warning, found.checked_steps) for warning in found.warnings]
    cards[:0] = [_card(warning) for warning in found.window]
    if found.whole_run is not None:
        cards.insert(0, _card(found.whole_run))
    unchecked = last_step is not None and not found.checked_steps
    return LintPanel(cards, (), len(CHECKS), _NOT_CHECKED if unchecked else None)


def _card(warning: WarningRead) -> LintCard:
    return LintCard(
        name=warning.name.replace("_", " "),
        severity=warning.severity,
        title=warning.title,
        seen=warning.seen,
        where=[_place(example) for example in warning.where],
        effect=warning.effect,
        remedy=warning.remedy,
    )


def _card_of_steps(run_address: str, warning: RunWarningRead, checked: int) -> LintCard:
    check = CHECKS.get(warning.name)
    since = f", since step {warning.first_step}" if warning.steps > 1 else ""
    return LintCard(
        name=warning.name.replace("_", " "),
        severity=warning.severity,
        title=warning.title,
        seen="",
        where=(),
        effect=check.effect if check is not None else "",
        remedy=check.remedy if check is not None else "",
        steps=f"at {count(warning.steps)} of {count(checked)} steps{since}",
        newest=warning.newest_step,
        newest_address=f"{run_address}/steps/{warning.newest_step}",
    )


def _place(example: ExampleRead) -> str:
    place = example.sample_id if example.token is None else f"{example.sample_id}, token {example.token}"
    return f"{place}: {example.text}" if example.text else place


def _words(check: CheckRead) -> str:
    return f"{check.name.replace('_', ' ')}: {check.why}"
