"""A k3 that is in its healthy range only because the policy is nearly certain."""

from __future__ import annotations

import math

from foreshock.healthy_ranges import required_range
from foreshock.lint.checks.pairs import Pairs, if_invalid
from foreshock.lint.checks.sampling import Surprisal
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome, format_number
from foreshock.measures.estimators.intervals import student_t_quantile
from foreshock.model_kind import MODEL_KIND_NAMES

_MEASURE = "k3_kl_per_entropy"
_LEAST_GROUPS = 4
_LEVEL = 0.975


def _check(judging: Judging) -> Outcome:
    """Check that k3 / mean entropy is in the healthy range, at the lower end of k3's interval (Student's t).

    The mean entropy is over the rollouts' tokens; without any it is the one that the trainer logged. A few tokens of
    one prompt can give half of k3, so the interval is clustered by prompt group.
    """
    tokens, by_group = judging[Surprisal].tokens, judging[Pairs].by_group
    entropy = judging[Surprisal].entropy / tokens if tokens else judging.entropy
    if entropy is None or not entropy > 0:
        return NotChecked("needs entropies, of the tokens or as a scalar of the step")
    groups = by_group.with_tokens
    k3, t = by_group.mean_and_t("k3")
    if groups < _LEAST_GROUPS or not math.isfinite(k3):
        return NotChecked(f"the interval of k3 needs {_LEAST_GROUPS} prompt groups, and there are {groups}")
    error = k3 / t if t and math.isfinite(t) else 0.0
    low = (k3 - student_t_quantile(_LEVEL, groups - 1) * error) / entropy
    known = required_range(_MEASURE, judging.model_kind)
    verdict = known.verdict(low)
    if verdict not in ("warning", "critical"):
        return Clean()
    if k3 > judging.healthy_k3:
        return Clean("k3 itself is beyond its healthy range")
    assert known.warning is not None
    source = f"over {tokens:,} tokens" if tokens else "a scalar of the trainer"
    seen = (
        f"k3 averages {format_number(k3)} and the entropy {format_number(entropy)} nats ({source}). Their ratio "
        f"is {format_number(k3 / entropy)}, by Student's t over {groups:,} prompt groups at least "
        f"{format_number(low)}; up to {format_number(known.warning)} is healthy for a "
        f"{MODEL_KIND_NAMES[judging.model_kind]}."
    )
    numbers = {"k3": k3, "entropy": entropy, "ratio": k3 / entropy, "ratio_low": low, "prompt_groups": groups}
    return Finding("critical" if verdict == "critical" else "warning", seen, numbers)


K3_PER_ENTROPY = Check(
    "k3_per_entropy",
    "k3 is too large for the entropy",
    "k3 alone is in its healthy range because the policy is nearly certain; per nat of entropy it is beyond.",
    "Find the cause as for a large k3: replay a step with a checkpoint (`foreshock probe`), and check the other "
    "findings. A low entropy makes any mismatch look small.",
    _check,
    unless=if_invalid,
    proven=False,
    explains=False,
)
