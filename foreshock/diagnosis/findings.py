"""Say as causes what the lint, the notary, the attribution and the doctor have found over the steps of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from foreshock.api.diagnosis import DiagnosisCause, MissingData
from foreshock.api.runs import FindingSource
from foreshock.diagnosis.history import NEWEST_STEPS
from foreshock.diagnosis.wording import plural
from foreshock.lint import CHECKS
from foreshock.severity import Severity, severity_rank

SAMPLING: Final = "sampling_not_declared"
LAG: Final = "lag_unknown"
"""`SAMPLING` and `LAG` are checks that find something missing and no fault."""

_LEAST_INFO_STEPS, _LEAST_INFO_SHARE = 3, 0.25
_LEAST_RECURRING = 3
_SELDOM = 0.25
"""What makes a mismatch is told with its number of steps if it was seen in less than this share of them."""
_MOSTLY = 0.9
"""A finding in at least this share of the steps is told in a headline without its number of steps."""

_CATALOGUE = {name: place for place, name in enumerate(CHECKS)}


@dataclass(frozen=True, slots=True)
class PastFinding:
    """What a source found in `steps` steps, `first_step` to `newest_step`; the words are those of the newest one."""

    source: FindingSource
    name: str
    severity: Severity
    title: str
    sentence: str
    remedy: str
    steps: int
    first_step: int
    newest_step: int


@dataclass(frozen=True, slots=True)
class ToldFindings:
    """Findings as causes; what to declare for the lint to tell more; what else is not logged."""

    causes: tuple[DiagnosisCause, ...] = ()
    undeclared: tuple[MissingData, ...] = ()
    unlogged: tuple[MissingData, ...] = ()


def tell_findings(
    findings: Iterable[PastFinding], newest_steps: Sequence[int], checked_since: Callable[[int], int]
) -> ToldFindings:
    """Return the findings in words, the gravest first, then in the order of the lint's catalogue.

    Findings of the lint are left out if the `newest_steps` no longer show them. An info is also left out if it has few
    steps or a small share of the steps. `checked_since` returns how many steps from one on were checked.
    """
    causes: list[DiagnosisCause] = []
    undeclared: list[MissingData] = []
    unlogged: list[MissingData] = []
    for found in sorted(findings, key=_order):
        if found.source in ("attribution", "doctor"):
            causes.append(_of_probe(found))
        elif _is_over(found, newest_steps):
            continue
        elif found.name in (SAMPLING, LAG):
            sentence = f"{found.title}: {found.sentence.rstrip('.')}"
            missing = MissingData(sentence=sentence, what_to_do=found.remedy)
            (undeclared if found.name == SAMPLING else unlogged).append(missing)
        elif cause := _of_steps(found, newest_steps, checked_since):
            causes.append(cause)
    return ToldFindings(tuple(causes), tuple(undeclared), tuple(unlogged))


def _order(found: PastFinding) -> tuple[int, int, str]:
    return severity_rank(found.severity), _CATALOGUE.get(found.name, 0), found.name


def _is_over(found: PastFinding, newest_steps: Sequence[int]) -> bool:
    if not newest_steps:
        return found.severity == "info" and found.steps < _LEAST_INFO_STEPS
    # A fault that recurs now and then is over if it has stayed away twice as long as it usually does. What makes the
    # mismatch must be seen in it.
    check, gap = CHECKS.get(found.name), 0.0
    if check is not None and not check.explains and found.steps >= _LEAST_RECURRING:
        gap = (found.newest_step - found.first_step) / (found.steps - 1)
    if newest_steps[-1] - found.newest_step >= max(NEWEST_STEPS, 2.0 * gap):
        return True
    # Estimated number of logged steps since the first one, at the density of the newest steps.
    density = len(newest_steps) / max(1, newest_steps[-1] - newest_steps[0])
    whole = density * (found.newest_step - found.first_step + 1)
    return found.severity == "info" and found.steps < max(_LEAST_INFO_STEPS, _LEAST_INFO_SHARE * whole)


def _of_probe(found: PastFinding) -> DiagnosisCause:
    dated = f"{found.title} (step {found.newest_step})"
    # The doctor's sentence begins with its title.
    begins_so = found.sentence[1:].startswith(found.title[1:])
    rest = found.sentence[len(found.title) :] if begins_so else f": {found.sentence}"
    return DiagnosisCause(
        name=found.name,
        sentence=dated + rest,
        source="doctor" if found.source == "doctor" else "probe",
        title=dated,
        what_to_do=found.remedy,
        evidence={"step": found.newest_step},
    )


def _of_steps(
    found: PastFinding, newest_steps: Sequence[int], checked_since: Callable[[int], int]
) -> DiagnosisCause | None:
    """Return a finding of the lint or the notary; None if it must last to be told and does not."""
    check = CHECKS.get(found.name)
    steps, first, newest = found.steps, found.first_step, found.newest_step
    when, share, seldom = f"in {plural(steps, 'step')}, {first} to {newest}", "", False
    if steps == 1:
        when = f"step {first}"
    elif steps == newest - first + 1:
        is_there = not newest_steps or newest >= newest_steps[-1]
        when = f"in every step since {first}" if is_there else f"in every step from {first} to {newest}"
    elif found.source == "lint":
        checked = checked_since(first)
        of_steps = f"in {steps:,} of {checked:,} steps"
        last = "" if newest_steps and newest >= newest_steps[-1] else f", last at {newest}"
        when, share = f"{of_steps} since {first}{last}", of_steps if steps < _MOSTLY * checked else ""
        seldom = steps < _SELDOM * checked
        if share and check is not None and check.lasting:
            return None
    return DiagnosisCause(
        name=found.name,
        sentence=f"{found.title} ({when}): {found.sentence}",
        source="notary" if found.source == "notary" else "lint",
        title=_title(found, share, seldom=seldom),
        certainty="shown" if check is None or check.proven else "possible",
        explains=check is None or check.explains,
        what_to_do=found.remedy,
        evidence={"steps": steps, "first_step": first, "newest_step": newest},
    )


def _title(found: PastFinding, share: str, *, seldom: bool) -> str:
    """Return a finding as a clause of the headline; empty if no headline names it.

    What makes a mismatch may go unseen in a step that has it; any other finding is a fact of each step, so the clause
    gives its `share` of the steps. It does so of the former too if it was seen `seldom`.
    """
    if found.source == "notary":
        return found.sentence.rstrip(".").replace(". ", "; ")
    check = CHECKS.get(found.name)
    if check is not None and check.auxiliary:
        return ""
    is_fact = check is not None and not check.explains
    return f"{found.title} {share}" if share and (is_fact or seldom) else found.title
