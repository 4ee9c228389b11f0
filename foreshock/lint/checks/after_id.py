"""Check for a token id at which the mismatch begins: an attention mask that drops an id which the model sampled.

Faulty masks give a mean k3 after the id of 349 to 4,424 times that of all tokens, measured on recorded runs; any other
id of those runs gives at most 8. Single large differences can follow a rare id by chance, and a policy that is
uncertain only after an id has most of its k3 there. So the id is compared with the responses that do not have it, in k3
per token and in k3 per nat of surprisal, and with the tokens before it; and large differences must follow it in several
responses of several prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

from foreshock.lint.checks.outcomes import Clean, Finding, NotChecked, Outcome
from foreshock.lint.evidence.after_id import MismatchAfterIds
from foreshock.lint.evidence.lint_evidence import LintEvidence
from foreshock.lint.formatting import format_number, format_percent
from foreshock.lint.report import Example

__all__ = ["PairTotals", "check_after_id", "check_mismatch_after_ids"]

_CHECK = "mismatch_after_id"
_TIMES_THE_OTHERS = 30.0
_TIMES_THEIR_RATE = 20.0
# With two prompts, 3 of 2,222 healthy batches have an id that large differences follow by chance (benchmarks/lint.py).
_LEAST_HITS, _LEAST_GROUPS, _HIT_SHARE = 3, 3, 0.2
# An id that nearly every response has leaves no others to compare with.
_LEAST_OTHERS = 0.1
# float32 log-probs give no smaller k3.
_LEAST_K3 = 1e-9


@dataclass(frozen=True, slots=True)
class PairTotals:
    """Tokens with two log-probs, and their Σ k3 and Σ −log μ in nats."""

    tokens: int
    k3: float
    surprisal: float


def check_after_id(evidence: LintEvidence) -> Outcome:
    """Check a batch or a step."""
    if not evidence.count("paired"):
        return NotChecked(_CHECK, "needs rollout_log_probs and trainer_log_probs")
    totals = PairTotals(evidence.count("paired"), evidence.sum("paired_k3"), evidence.sum("paired_surprisal"))
    return check_mismatch_after_ids(evidence.after_ids, totals, evidence.where(_CHECK))


def check_mismatch_after_ids(table: MismatchAfterIds, totals: PairTotals, where: tuple[Example, ...] = ()) -> Outcome:
    """Return the finding on the id with the largest mean k3 after it, of those that satisfy every condition."""
    found = [each for index in range(table.ids.size) if (each := _finding(table, index, totals, where)) is not None]
    return max(found, key=lambda each: each.evidence["k3_after"], default=Clean(_CHECK))


def _finding(table: MismatchAfterIds, index: int, totals: PairTotals, where: tuple[Example, ...]) -> Finding | None:
    token_id, after = int(table.ids[index]), table.count(index, "tokens")
    before, rollouts, hits = (table.count(index, name) for name in ("tokens_before", "rollouts", "hits"))
    enough = hits >= max(_LEAST_HITS, _HIT_SHARE * rollouts) and table.count(index, "groups") >= _LEAST_GROUPS
    others = totals.tokens - after - before
    if not enough or not before or others < _LEAST_OTHERS * totals.tokens:
        return None
    k3, k3_before = table.sum(index, "k3"), table.sum(index, "k3_before")
    surprisal, surprisal_before = table.sum(index, "surprisal"), table.sum(index, "surprisal_before")
    of_others = max((totals.k3 - k3 - k3_before) / others, _LEAST_K3)
    surprisal_of_others = max((totals.surprisal - surprisal - surprisal_before) / others, _LEAST_K3)
    mean, mean_before = k3 / after, max(k3_before / before, _LEAST_K3)
    # k3 / mean surprisal, so that tokens are compared with equally uncertain ones.
    times_rate = (k3 / max(surprisal, _LEAST_K3)) / (of_others / surprisal_of_others)
    begins_here = mean >= _TIMES_THE_OTHERS * max(of_others, mean_before)
    if not begins_here or times_rate < _TIMES_THEIR_RATE:
        return None
    over_mean = mean / (totals.k3 / totals.tokens)
    seen = (
        f"Your mask drops token {token_id}, which the model sampled: after its first occurrence in a response k3 "
        f"averages {format_number(mean)} ({after:,} tokens of {rollouts:,} responses), before it "
        f"{format_number(mean_before)}, in responses without it {format_number(of_others)}. "
        f"{format_percent(after, totals.tokens)} of the tokens have {format_percent(k3, totals.k3)} of all k3."
    )
    numbers = {
        "token_id": float(token_id),
        "rollouts": rollouts,
        "tokens_after": after,
        "k3_after": mean,
        "k3_before": mean_before,
        "k3_of_other_responses": of_others,
        "k3_after_over_mean": over_mean,
    }
    return Finding(
        _CHECK, "critical", seen, numbers, tuple(each for each in where if each.text.startswith(f"id {token_id},"))
    )
