"""From evidence to a report: each check fires, is clean, or says why it could not be made.

A healthy run of a thousand steps should give no warning. The checks that look for patterns which sampling cannot make
(a copied column, one dropped id, a rounded type) have no chance in them worth naming; the four that test a number
(surprisal, mean ratio, shift, duplicates) fire at a chance of FALSE_ALARM a step, and only where the effect is large
enough to matter.
"""

from __future__ import annotations

import numpy as np

from foreshock.lint.catalogue import CHECKS
from foreshock.lint.evidence import LintEvidence
from foreshock.lint.findings import Finding, NotChecked, Outcome, assemble
from foreshock.lint.judge_pairs import judge_equal, judge_ratio, judge_shift
from foreshock.lint.judge_rollouts import judge_dropped, judge_duplicates, judge_masked
from foreshock.lint.judge_sampling import judge_surprisal
from foreshock.lint.judge_values import judge_finite, judge_rounding, judge_signs, unreadable_columns
from foreshock.lint.report import LintReport

__all__ = ["judge"]


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
    note(judge_finite(evidence), judge_rounding(evidence))
    equal = judge_equal(evidence)
    note(equal)
    if isinstance(equal, Finding):
        why = "the two log-probs are the same numbers"
        note(*(NotChecked(name, why) for name in ("processed_log_probs", "mean_ratio", "shifted_log_probs")))
    else:
        shift = judge_shift(evidence)
        note(shift)
        if isinstance(shift, Finding):
            why = "the two log-probs belong to different tokens"
            note(*(NotChecked(name, why) for name in ("processed_log_probs", "mean_ratio")))
        else:
            note(*judge_ratio(evidence))
    processed = isinstance(outcomes["processed_log_probs"], Finding)
    note(judge_surprisal(evidence, processed=processed))
    dropped = judge_dropped(evidence)
    if isinstance(outcomes["shifted_log_probs"], Finding):
        dropped = dropped[0], NotChecked("tokens_without_trainer", "a shift leaves the ends without a value")
    note(*dropped, judge_masked(evidence, dropped), judge_duplicates(evidence))
    return assemble(evidence, outcomes.values())
