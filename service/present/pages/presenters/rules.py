"""The presenter of a run's rules: what watches it, with which thresholds and why, and what was changed since when."""

from __future__ import annotations

from typing import Final, get_args

from foreshock.diagnosis.reward import RULE as REWARD_FALL
from foreshock.diagnosis.rule import Cause, Effect, ThresholdRule
from foreshock.diagnosis.surge_state import RULES as SURGE_RULES
from foreshock.page_addresses import run_page_path
from foreshock.severity import Severity
from foreshock_service.present.pages.formatting import TONES, moment, number
from foreshock_service.present.pages.presenters.run import model_kind_in_words
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.present.pages.rules_models import RuleCard, RuleForm, RuleGroup, RulesPage, VersionRow
from foreshock_service.present.pages.view_models import Label
from foreshock_service.watch.rules.service import DELIVERY_RULES, RuleOfRun, rules_of_run

EFFECTS: Final[dict[Effect, str]] = {
    "none": "none on the learning rate",
    "hold": "holds the learning rate while it fires",
    "halve": "halves the learning rate once",
}
CAUSES: Final[dict[Cause, str]] = {
    "mismatch": "Mismatch",
    "sampling": "Sampling",
    "policy": "Policy",
    "gradient": "Gradient",
    "length": "Lengths",
    "staleness": "Staleness",
    "data": "Data",
}


def rules_page(viewing: Viewing, run_id: str) -> RulesPage:
    """Return the page of the run's rules. Raises RunNotFound or RunDeleted."""
    found = rules_of_run(viewing.session, viewing.principal, run_id)
    run = found.run
    groups = {cause: [each for each in found.rules if each.rule.cause == cause] for cause in CAUSES}
    return RulesPage(
        run_name=run.name or run.key,
        run_address=run_page_path(run.project, run.key),
        project=run.project,
        forms_address=f"/runs/{run.id}/rules",
        model_kind=model_kind_in_words(run),
        groups=[RuleGroup(CAUSES[cause], [_card(each) for each in rules]) for cause, rules in groups.items() if rules],
        versions=[
            VersionRow(each.version, each.effective_from_step, moment(each.made_at_us), each.toml)
            for each in reversed(found.versions)
        ],
        first_step=0 if run.last_step is None else run.last_step + 1,
        toml=found.toml,
        severities=get_args(Severity),
        effects=get_args(Effect),
        detectors=[_title(name) for name in (*sorted(set(SURGE_RULES.values())), REWARD_FALL, *DELIVERY_RULES)],
    )


def _card(found: RuleOfRun) -> RuleCard:
    rule = found.rule
    return RuleCard(
        name=rule.name,
        title=_title(rule.name),
        severity=Label(rule.severity, TONES[rule.severity]),
        threshold=threshold_in_words(rule),
        state=_state(found),
        reads=rule.key,
        evidence=_evidence(rule),
        changed=[f"{field} {_value(value)}, default {_value(before)}" for field, value, before in found.changes()],
        why=rule.why,
        what_to_do=rule.what_to_do,
        effect=EFFECTS[rule.effect],
        source=rule.source,
        form=RuleForm(
            absolute=_entered(rule.absolute),
            relative=_entered(rule.relative),
            minimum_duration="" if rule.pooled is not None else str(rule.minimum_duration),
            severity=rule.severity,
            effect=rule.effect,
            enabled=found.enabled,
            resets=found.default is not None and (not found.enabled or rule != found.default),
        ),
    )


def threshold_in_words(rule: ThresholdRule) -> str:
    """Return a rule's thresholds: `above 0.01 and above 3 × the baseline`."""
    base = "the baseline" if rule.reference is None else rule.reference
    bounds = [number(rule.absolute)] if rule.absolute is not None else []
    bounds += [f"{number(rule.relative)} × {base}"] if rule.relative is not None else []
    if rule.direction == "away":
        return " and ".join(f"farther than {bound} from {number(rule.ideal)}" for bound in bounds)
    return " and ".join(f"{rule.direction} {bound}" for bound in bounds)


def _evidence(rule: ThresholdRule) -> str:
    if rule.pooled is not None:
        steps = "the steps pooled"
    else:
        steps = "1 step" if rule.minimum_duration == 1 else f"{rule.minimum_duration} steps in a row"
    return f"{steps}, at lag 0 only" if rule.lag_zero_only else steps


def _state(found: RuleOfRun) -> Label | None:
    since = "" if found.since in (None, 0) else f" since step {found.since}"
    if not found.enabled:
        return Label(f"off{since}", "warning")
    if found.default is None:
        return Label(f"added{since}", "warning")
    return Label(f"changed{since}", "warning") if found.rule != found.default else None


def _title(name: str) -> str:
    return name.replace("_", " ")


def _entered(value: float | None) -> str:
    return "" if value is None else repr(value)


def _value(value: object) -> str:
    return number(value) if isinstance(value, float) else "none" if value is None else str(value)
