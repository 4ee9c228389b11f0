"""What the lint found at a step or in a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreshock.api.steps import CheckRecord, LintWarningRecord, RunWarningRecord
from foreshock.lint import CHECKS
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.runs import lint

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
    not_checked = [check for check in found.checks if check.state == "not checked"]
    note = None
    if found.coverage is not None and found.coverage.rests_on != "all tokens":
        note = f"Semantics: checked on {found.coverage.text}."
    placeholders = (each for each in found.checks if each.name == "placeholder_log_probs" and each.state == "clean")
    ignored = next((each.why for each in placeholders), "")
    return LintPanel(len(found.checks), found.warnings, not_checked, note, ignored)


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
