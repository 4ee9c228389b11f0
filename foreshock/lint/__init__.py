"""The semantics lint: are these log-probs what they are taken for? It runs before any number is shown.

`lint_batch` judges one batch, so that a trainer can look at its first. `gather_evidence` and `judge` are its two
halves: evidence of shards merges, and the merged evidence is judged like that of one batch.
"""

from __future__ import annotations

from foreshock.lint.catalogue import CHECKS
from foreshock.lint.evidence import LintEvidence
from foreshock.lint.gather import gather_evidence
from foreshock.lint.judge import judge
from foreshock.lint.report import CheckResult, Example, LintReport, LintWarning
from foreshock.rollouts.batch import RolloutBatch

__all__ = [
    "CHECKS",
    "CheckResult",
    "Example",
    "LintEvidence",
    "LintReport",
    "LintWarning",
    "gather_evidence",
    "judge",
    "lint_batch",
]


def lint_batch(batch: RolloutBatch) -> LintReport:
    """What is wrong with the meaning of this batch's log-probs, masks and rollouts, and what could not be checked.

    The batch need not be validated beyond its shape: probabilities where log-probs belong are a warning here, and an
    error elsewhere. Costs less than measuring the batch.
    """
    return judge(gather_evidence(batch))
