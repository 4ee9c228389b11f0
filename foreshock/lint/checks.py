"""Run all checks on the evidence. An earlier finding can rule out later checks.

A healthy run of a thousand steps should give no warning. Checks for a pattern that sampling cannot produce (a copied
column, one dropped id, a rounded type) have a negligible chance of a false alarm. The four that test a number
(surprisal, mean ratio, shift, duplicates) have a chance of FALSE_ALARM per step, and also require a minimum effect.
"""

import math
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from foreshock.api.steps import CheckRecord, CheckState, LintWarningRecord
from foreshock.lint.after_id import check_after_id
from foreshock.lint.alignment import check_log_base, check_shift, check_temperatures, check_trainer_temperature
from foreshock.lint.evidence import LintEvidence
from foreshock.lint.missing_log_probs import check_masked_values, check_missing_engine, check_missing_trainer
from foreshock.lint.pairs import check_clipping, check_identical, check_k3_per_entropy, check_mean_ratio
from foreshock.lint.places import check_evenness, check_places
from foreshock.lint.report import (
    CHECKS,
    Clean,
    Example,
    Finding,
    LintReport,
    NotChecked,
    Outcome,
)
from foreshock.lint.sampling import check_declaration, check_lag, check_sampling
from foreshock.lint.values import check_finite, check_rounding, check_signs, columns_without_log_probs
from foreshock.lint.whole_rollouts import check_duplicates, check_responses, check_reward_spread
from foreshock.model_kind import ModelKind
from foreshock.severity import severity_rank

_OF_PAIRS = (
    "processed_log_probs",
    "mean_ratio",
    "temperature_of_trainer",
    "mismatch_after_id",
    "mismatch_by_place",
    "k3_per_entropy",
    "temperatures_differ",
)
_OF_ALIGNMENT = ("shifted_log_probs", "wrong_log_base")
_OF_ENDS = ("tokens_without_engine", "tokens_without_trainer", "pad_id_sampled")
_COPIED = "the two log-probs are the same numbers"
# Findings that invalidate the mean of ρ, in the order in which to fix them.
_INVALIDATING = {
    "shifted_log_probs": "the two log-probs belong to different tokens",
    "wrong_log_base": "the two log-probs are of different bases",
    "tokens_without_engine": "some tokens have no log μ",
    "tokens_without_trainer": "some tokens have no log π",
    "pad_id_sampled": "some tokens have no log π",
}
# Those of _INVALIDATING that leave log μ valid.
_TRAINER_ONLY = ("tokens_without_trainer", "pad_id_sampled")
_MOST_WITHOUT = 1e-3
# Findings that are dropped if a more specific finding explains the same data.
_YIELDS = {
    "temperatures_differ": ("temperature_of_trainer", "processed_log_probs"),
    "mean_ratio": ("mismatch_by_place", "mismatch_after_id"),
    "mismatch_by_place": ("mismatch_after_id",),
}


@np.errstate(all="ignore")
def run_checks(
    evidence: LintEvidence, *, entropy: float | None = None, model_kind: ModelKind | None = None
) -> LintReport:
    """Return the report over all rollouts of the evidence.

    `entropy` is the trainer's mean entropy in nats, used if the rollouts have none per token. `model_kind` chooses the
    healthy ranges; None takes the wider ones of mixtures of experts.
    """
    outcomes: dict[str, Outcome] = {}

    def record(*found: Outcome) -> None:
        outcomes.update({outcome.check: outcome for outcome in found})

    record(*check_signs(evidence))
    if invalid := columns_without_log_probs(evidence):
        why = f"the {' and the '.join(invalid)} column holds no log-probs"
        record(*(NotChecked(name, why) for name in CHECKS if name not in outcomes))
        return _report(evidence, outcomes.values())
    record(
        check_finite(evidence), check_rounding(evidence), check_identical(evidence), *check_missing_trainer(evidence)
    )
    if evidence.count("paired") and evidence.count("equal") == evidence.count("paired"):
        why = _COPIED
        record(*(NotChecked(name, why) for name in (*_OF_PAIRS, *_OF_ALIGNMENT, "tokens_without_engine")))
    else:
        record(check_shift(evidence), check_log_base(evidence), check_missing_engine(evidence))
        if isinstance(outcomes["shifted_log_probs"], Finding):
            record(*(NotChecked(name, "a shift leaves the ends without a value") for name in _OF_ENDS))
        why = next((why for name, why in _INVALIDATING.items() if isinstance(outcomes[name], Finding)), "")
        record(
            *(NotChecked(name, why) for name in _OF_PAIRS)
            if why
            else (
                *check_mean_ratio(evidence),
                check_trainer_temperature(evidence),
                check_after_id(evidence),
                check_places(evidence, model_kind),
                check_temperatures(evidence, model_kind),
                check_k3_per_entropy(evidence, entropy, model_kind),
            )
        )
    record(*_yielding(evidence, outcomes, why, model_kind))
    found = [name for name, outcome in outcomes.items() if isinstance(outcome, Finding)]
    covered = not {"processed_log_probs", "mean_ratio"}.intersection(found)
    record(*check_sampling(evidence, unreliable=unreliable_surprisal(evidence, found), covered=covered))
    record(check_clipping(evidence), check_declaration(evidence, outcomes["raw_log_probs"]))
    record(check_lag(evidence))
    record(check_masked_values(evidence, outcomes["pad_id_sampled"]))
    record(check_reward_spread(evidence), *check_responses(evidence))
    unknown = any(isinstance(outcomes[name], Finding) for name in ("raw_log_probs", "wrong_log_base"))
    record(check_duplicates(evidence, distribution_known=not unknown))
    return _report(evidence, outcomes.values())


def _yielding(
    evidence: LintEvidence, outcomes: Mapping[str, Outcome], why: str, model_kind: ModelKind | None
) -> list[Outcome]:
    """Return the outcomes of checks that a more specific finding replaces."""
    found = [name for name in _OF_PAIRS if isinstance(outcomes[name], Finding) and name != "k3_per_entropy"]
    why = why or (f"explained by {found[0]}" if found else "")
    even = NotChecked("mismatch_everywhere", why) if why else check_evenness(evidence, model_kind)
    yielding: list[Outcome] = [even]
    for name, explained_by in _YIELDS.items():
        by = next((each for each in explained_by if each in found), None)
        if name in found and by is not None:
            yielding.append(NotChecked(name, f"explained by {by}"))
    return yielding


def unreliable_surprisal(evidence: LintEvidence, found: Collection[str]) -> str:
    """Return why the surprisal test is invalid, given the names of the findings; an empty string if it is valid."""
    if "processed_log_probs" in found:
        return "the log-probs are processed, and `entropy` may be that of the distribution before processing"
    if why := next((why for name, why in _INVALIDATING.items() if name in found and name not in _TRAINER_ONLY), ""):
        return why
    no_log_prob = ("nan", "minus_inf", "plus_inf", "placeholders")
    without = sum(evidence.count(f"rollout_{kind}") for kind in no_log_prob)
    # The tokens without a log μ may all be ends of sequences: the remaining tokens are then a biased sample.
    too_many = without > _MOST_WITHOUT * evidence.count("rollout_logged")
    return "too many tokens have no log μ" if too_many else ""


def outcome_records(outcome: Outcome, where: Iterable[Example] = ()) -> tuple[LintWarningRecord | None, CheckRecord]:
    """Return the records to show for an outcome: a warning if it is a finding, and the result of its check.

    `where` holds the examples for a finding without examples of its own.
    """
    check = CHECKS[outcome.check]
    if not isinstance(outcome, Finding):
        state: CheckState = "clean" if isinstance(outcome, Clean) else "not checked"
        return None, CheckRecord(name=check.name, title=check.title, state=state, why=outcome.why)
    warning = LintWarningRecord(
        name=check.name,
        severity=outcome.severity,
        title=outcome.title or check.title,
        seen=outcome.seen,
        evidence={key: float(value) for key, value in outcome.evidence.items() if math.isfinite(value)},
        where=tuple(example.record() for example in (where if outcome.where is None else outcome.where)),
        effect=check.effect,
        remedy=check.remedy,
    )
    return warning, CheckRecord(name=check.name, title=check.title, state="warned", why="")


def _report(evidence: LintEvidence, outcomes: Iterable[Outcome]) -> LintReport:
    """Return the report of the outcomes, one for each check, in the order of the catalogue, critical warnings first."""
    by_name = {outcome.check: outcome for outcome in outcomes}
    found = [outcome_records(by_name[name], evidence.where(name)) for name in CHECKS]
    warnings = [warning for warning, _ in found if warning is not None]
    warnings.sort(key=lambda warning: severity_rank(warning.severity))
    results = tuple(result for _, result in found)
    return LintReport(evidence.count("rollouts"), evidence.count("tokens"), tuple(warnings), results)
