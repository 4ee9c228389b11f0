"""Check k3 against the entropy: a policy that is nearly certain has a small k3 whatever the mismatch is."""

from __future__ import annotations

import math

from foreshock.lint.checks.outcomes import Clean, Finding, NotChecked, Outcome
from foreshock.lint.evidence.lint_evidence import LintEvidence
from foreshock.lint.formatting import format_number
from foreshock.measures.estimators.intervals import student_t_quantile
from foreshock.model_kind import MODEL_KIND_NAMES, ModelKind
from foreshock.ranges import required_range

__all__ = ["check_k3_per_entropy"]

_CHECK, _MEASURE = "k3_per_entropy", "k3_kl_per_entropy"
_LEAST_GROUPS = 4
_LEVEL = 0.975


def check_k3_per_entropy(
    evidence: LintEvidence, entropy: float | None = None, model_kind: ModelKind | None = None
) -> Outcome:
    """Check that the lower end of k3's interval, Student's t, divided by the mean entropy, is in the healthy range.

    The mean entropy is that of the rollouts' tokens; without any it is `entropy`, which the trainer logged, in nats.
    Half of k3 can be a few tokens of one prompt, so the interval is over prompt groups.
    """
    if not evidence.count("paired"):
        return NotChecked(_CHECK, "needs rollout_log_probs and trainer_log_probs")
    tokens = evidence.count("surprisal_tokens")
    mean_entropy = evidence.sum("entropy") / tokens if tokens else entropy
    if mean_entropy is None or not mean_entropy > 0:
        return NotChecked(_CHECK, "needs entropies, of the tokens or as a scalar of the step")
    groups = int((evidence.groups.tokens > 0).sum())
    k3, t = evidence.groups.mean_and_t("k3")
    if groups < _LEAST_GROUPS or not math.isfinite(k3):
        return NotChecked(_CHECK, f"the interval of k3 needs {_LEAST_GROUPS} prompt groups, and there are {groups}")
    error = k3 / t if t and math.isfinite(t) else 0.0
    low = (k3 - student_t_quantile(_LEVEL, groups - 1) * error) / mean_entropy
    known = required_range(_MEASURE, model_kind or "moe")
    verdict = known.verdict(low)
    if verdict not in ("warning", "critical"):
        return Clean(_CHECK)
    assert known.warning is not None
    kind = MODEL_KIND_NAMES[model_kind or "moe"]
    source = f"over {tokens:,} tokens" if tokens else "a scalar of the trainer"
    seen = (
        f"k3 averages {format_number(k3)} and the entropy {format_number(mean_entropy)} nats ({source}). Their ratio "
        f"is {format_number(k3 / mean_entropy)}, by Student's t over {groups:,} prompt groups at least "
        f"{format_number(low)}; up to {format_number(known.warning)} is healthy for a {kind}."
    )
    numbers = {"k3": k3, "entropy": mean_entropy, "ratio": k3 / mean_entropy, "ratio_low": low, "prompt_groups": groups}
    return Finding(_CHECK, "critical" if verdict == "critical" else "warning", seen, numbers)
