"""From evidence to a report: each check fires, is clean, or says why it could not be made.

A healthy run of a thousand steps should give no warning. The checks that look for patterns which sampling cannot make
(a copied column, one dropped id, a rounded type) have no chance in them worth naming; the four that test a number
(surprisal, mean ratio, shift, duplicates) fire at a chance of FALSE_ALARM a step, and only where the effect is large
enough to matter.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from foreshock.lint.catalogue import CHECKS
from foreshock.lint.evidence import LintEvidence
from foreshock.lint.findings import Finding, NotChecked, Outcome, assemble
from foreshock.lint.judge_pairs import judge_equal, judge_ratio, judge_scale, judge_shift, judge_temperature
from foreshock.lint.judge_rollouts import judge_dropped, judge_duplicates, judge_masked, judge_without_engine
from foreshock.lint.judge_sampling import judge_surprisal
from foreshock.lint.judge_values import judge_finite, judge_rounding, judge_signs, unreadable_columns
from foreshock.lint.report import LintReport

__all__ = ["judge"]

_OF_PAIRS = ("processed_log_probs", "mean_ratio", "temperature_of_trainer")
_OF_ALIGNMENT = ("shifted_log_probs", "wrong_log_base")
_OF_ENDS = ("tokens_without_engine", "tokens_without_trainer", "pad_id_sampled")
_COPIED = "the two log-probs are the same numbers"
# Findings after which the mean of ρ says nothing more, in the order of what to mend first.
_SPOILING = {
    "shifted_log_probs": "the two log-probs belong to different tokens",
    "wrong_log_base": "the two log-probs are of different bases",
    "positive_log_probs": "some values are no log-probs",
    "tokens_without_engine": "some tokens have no log μ",
    "tokens_without_trainer": "some tokens have no log π",
    "pad_id_sampled": "some tokens have no log π",
}
# Those that spoil log μ itself, or may.
_OF_BOTH = tuple(why for name, why in _SPOILING.items() if name not in ("tokens_without_trainer", "pad_id_sampled"))
_MOST_LOST = 1e-3


@np.errstate(all="ignore")
def judge(evidence: LintEvidence) -> LintReport:
    """The report over everything that went into `evidence`."""
    outcomes: dict[str, Outcome] = {}

    def note(*found: Outcome) -> None:
        outcomes.update({outcome.check: outcome for outcome in found})

    note(*judge_signs(evidence))
    if unreadable := unreadable_columns(evidence):
        why = f"the {' and the '.join(unreadable)} column holds no log-probs"
        note(*(NotChecked(name, why) for name in CHECKS if name not in outcomes))
        return assemble(evidence, outcomes.values())
    note(judge_finite(evidence), judge_rounding(evidence), judge_equal(evidence), *judge_dropped(evidence))
    if evidence.count("paired") and evidence.count("equal") == evidence.count("paired"):
        why = _COPIED
        note(*(NotChecked(name, why) for name in (*_OF_PAIRS, *_OF_ALIGNMENT, "tokens_without_engine")))
    else:
        note(judge_shift(evidence), judge_scale(evidence), judge_without_engine(evidence))
        if isinstance(outcomes["shifted_log_probs"], Finding):
            note(*(NotChecked(name, "a shift leaves the ends without a value") for name in _OF_ENDS))
        why = next((why for name, why in _SPOILING.items() if isinstance(outcomes[name], Finding)), "")
        note(
            *(NotChecked(name, why) for name in _OF_PAIRS)
            if why
            else (*judge_ratio(evidence), judge_temperature(evidence))
        )
    note(*judge_surprisal(evidence, unreliable=_unreliable(evidence, outcomes, why), covered=_covered(outcomes)))
    note(judge_masked(evidence, outcomes["pad_id_sampled"]))
    unknown = any(isinstance(outcomes[name], Finding) for name in ("raw_log_probs", "wrong_log_base"))
    note(judge_duplicates(evidence, law_known=not unknown))
    return assemble(evidence, outcomes.values())


def _unreliable(evidence: LintEvidence, outcomes: Mapping[str, Outcome], why: str) -> str:
    """Why the surprisal test has no meaning; empty where it has."""
    if isinstance(outcomes["processed_log_probs"], Finding):
        return "the log-probs are processed, and `entropy` may be of the law before that"
    if why in _OF_BOTH:
        return why
    lost = sum(evidence.count(f"rollout_{kind}") for kind in ("nan", "minus_inf", "plus_inf"))
    # Ends of sequences without a log μ are no random part of the tokens.
    return "too many tokens have no finite log μ" if lost > _MOST_LOST * evidence.count("rollout_logged") else ""


def _covered(outcomes: Mapping[str, Outcome]) -> bool:
    return not any(isinstance(outcomes[name], Finding) for name in ("processed_log_probs", "mean_ratio"))
