"""Run all checks on evidence, in an order in which an earlier finding can rule out later checks.

A healthy run of a thousand steps should give no warning. Checks for a pattern that sampling cannot produce (a copied
column, one dropped id, a rounded type) have a negligible chance of a false alarm. The four that test a number
(surprisal, mean ratio, shift, duplicates) have a chance of FALSE_ALARM per step, and also require a minimum effect.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from foreshock.lint.catalogue import CHECKS
from foreshock.lint.checks.after_id import check_after_id
from foreshock.lint.checks.duplicates import check_duplicates
from foreshock.lint.checks.missing_log_probs import check_masked_values, check_missing_engine, check_missing_trainer
from foreshock.lint.checks.outcomes import Finding, NotChecked, Outcome, build_report
from foreshock.lint.checks.pairs import (
    check_identical,
    check_log_base,
    check_mean_ratio,
    check_shift,
    check_trainer_temperature,
)
from foreshock.lint.checks.per_entropy import check_k3_per_entropy
from foreshock.lint.checks.sampling import check_sampling
from foreshock.lint.checks.values import check_finite, check_rounding, check_signs, columns_without_log_probs
from foreshock.lint.evidence.lint_evidence import LintEvidence
from foreshock.lint.report import LintReport
from foreshock.model_kind import ModelKind

__all__ = ["run_checks"]

_OF_PAIRS = ("processed_log_probs", "mean_ratio", "temperature_of_trainer", "mismatch_after_id", "k3_per_entropy")
_OF_ALIGNMENT = ("shifted_log_probs", "wrong_log_base")
_OF_ENDS = ("tokens_without_engine", "tokens_without_trainer", "pad_id_sampled")
_COPIED = "the two log-probs are the same numbers"
# Findings that invalidate the mean of ρ, in the order in which to fix them.
_INVALIDATING = {
    "shifted_log_probs": "the two log-probs belong to different tokens",
    "wrong_log_base": "the two log-probs are of different bases",
    "positive_log_probs": "some values are not log-probs",
    "tokens_without_engine": "some tokens have no log μ",
    "tokens_without_trainer": "some tokens have no log π",
    "pad_id_sampled": "some tokens have no log π",
}
# Those that also invalidate log μ, or may.
_TRAINER_ONLY = ("tokens_without_trainer", "pad_id_sampled")
_INVALIDATING_MU = tuple(why for name, why in _INVALIDATING.items() if name not in _TRAINER_ONLY)
_MOST_NON_FINITE = 1e-3


@np.errstate(all="ignore")
def run_checks(
    evidence: LintEvidence, *, entropy: float | None = None, model_kind: ModelKind | None = None
) -> LintReport:
    """Return the report over all rollouts of the evidence.

    `entropy` is the trainer's mean entropy in nats, used if the rollouts have none per token. `model_kind` chooses the
    healthy range of k3 / entropy; None: the wider one of mixtures of experts.
    """
    outcomes: dict[str, Outcome] = {}

    def record(*found: Outcome) -> None:
        outcomes.update({outcome.check: outcome for outcome in found})

    record(*check_signs(evidence))
    if invalid := columns_without_log_probs(evidence):
        why = f"the {' and the '.join(invalid)} column holds no log-probs"
        record(*(NotChecked(name, why) for name in CHECKS if name not in outcomes))
        return build_report(evidence, outcomes.values())
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
                check_k3_per_entropy(evidence, entropy, model_kind),
            )
        )
    record(*check_sampling(evidence, unreliable=_unreliable(evidence, outcomes, why), covered=_covered(outcomes)))
    record(check_masked_values(evidence, outcomes["pad_id_sampled"]))
    unknown = any(isinstance(outcomes[name], Finding) for name in ("raw_log_probs", "wrong_log_base"))
    record(check_duplicates(evidence, distribution_known=not unknown))
    return build_report(evidence, outcomes.values())


def _unreliable(evidence: LintEvidence, outcomes: Mapping[str, Outcome], why: str) -> str:
    """Return the reason why the surprisal test is not valid; an empty string if it is."""
    if isinstance(outcomes["processed_log_probs"], Finding):
        return "the log-probs are processed, and `entropy` may be that of the distribution before processing"
    if why in _INVALIDATING_MU:
        return why
    non_finite = sum(evidence.count(f"rollout_{kind}") for kind in ("nan", "minus_inf", "plus_inf"))
    # The tokens without a log μ may all be ends of sequences: the remaining tokens are then a biased sample.
    too_many = non_finite > _MOST_NON_FINITE * evidence.count("rollout_logged")
    return "too many tokens have no finite log μ" if too_many else ""


def _covered(outcomes: Mapping[str, Outcome]) -> bool:
    return not any(isinstance(outcomes[name], Finding) for name in ("processed_log_probs", "mean_ratio"))
