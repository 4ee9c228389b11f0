"""The semantics lint: check that log-probs, masks and rollouts have the meaning that their columns claim.

`lint_batch` checks one batch, for example a trainer's first. It is `collect_evidence` followed by `run_checks`: the
evidence of shards merges, and the merged evidence is checked like that of one batch.
"""

from foreshock.lint.checks import CHECKS
from foreshock.lint.evidence import LintEvidence, collect_evidence
from foreshock.lint.report import LintReport, run_checks
from foreshock.model_kind import ModelKind
from foreshock.rollouts.batch import RolloutBatch

__all__ = [
    "CHECKS",
    "LintEvidence",
    "LintReport",
    "collect_evidence",
    "lint_batch",
    "run_checks",
]


def lint_batch(batch: RolloutBatch, *, entropy: float | None = None, model_kind: ModelKind | None = None) -> LintReport:
    """Return the warnings of a batch, and the checks that could not be made.

    Only the shape of the batch has to be valid: probabilities in place of log-probs are a warning here, and an error
    elsewhere. Takes less time than measuring the batch. `entropy` and `model_kind` are those of `run_checks`.
    """
    return run_checks(collect_evidence(batch), entropy=entropy, model_kind=model_kind)
