"""Pairs of log-probs: what several checks count at the tokens that have both; and a log π that is a copy of log μ."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from foreshock.lint.checks.declared import Declared
from foreshock.lint.checks.responses import Rollouts
from foreshock.lint.counting import LARGEST_D, Counting, Counts, Table, TokenPairs
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome
from foreshock.rollouts.arrays import row_sums
from foreshock.severity import Severity

_NO_PAIRS = "needs rollout_log_probs and trainer_log_probs"
# A token with log μ below this is uncertain: two computations of it agree in every bit by chance at most.
_UNCERTAIN = -0.01
# This many uncertain tokens of a rollout agree bit for bit only if one column is a copy of the other.
_LEAST_COPIED = 8
_LEAST_UNCERTAIN = 20
_LEAST_COPIED_ROLLOUTS, _COPIED_SHARE = 2, 0.05
# The findings that invalidate log μ, and those that invalidate its difference from log π, in the order to fix them.
OF_BEHAVIOUR = {
    "shifted_log_probs": "the two log-probs belong to different tokens",
    "wrong_log_base": "the two log-probs are of different bases",
    "tokens_without_engine": "some tokens have no log μ",
    "likelier_token_logged": "log μ is not that of the sampled tokens",
}
_INVALIDATING = OF_BEHAVIOUR | {
    "rows_exchanged": "the two log-probs belong to different rollouts",
    "tokens_without_trainer": "some tokens have no log π",
    "pad_id_sampled": "some tokens have no log π",
}


class PairsByGroup(Table):
    """Tokens with two log-probs, Σ(ρ − 1) and Σ k3 in nats by prompt group, and the tokens of its prompt."""

    COLUMNS = ("tokens", "ratio_minus_one", "k3", "prompt_tokens")
    LARGEST = 1

    @property
    def with_tokens(self) -> int:
        """The number of groups with a token."""
        return int((self.column("tokens") > 0).sum())

    def mean_and_t(self, name: str) -> tuple[float, float]:
        """Return the token mean and its Student's t against 0, clustered by group; NaN if not estimable."""
        values, tokens, groups = self.column(name), self.column("tokens"), self.with_tokens
        total = tokens.sum()
        if total == 0:
            return math.nan, math.nan
        mean = float(values.sum() / total)
        square = float(np.square(values - mean * tokens).sum())
        if groups < 2 or not math.isfinite(square):
            return mean, math.nan
        error = math.sqrt(square * groups / (groups - 1)) / float(total)
        if error == 0.0:
            return mean, math.copysign(math.inf, mean) if mean else 0.0
        return mean, mean / error


@dataclass
class Pairs(Counts):
    """The generated tokens with two valid log-probs."""

    tokens: int = 0
    equal: int = 0  # of these: bit for bit the same number
    uncertain: int = 0  # log μ below −0.01
    copiable_rollouts: int = 0  # rollouts with eight uncertain tokens or more
    copied_rollouts: int = 0  # of these: log π equals log μ at every uncertain token
    k3: float = 0.0  # Σ(ρ − 1 − d)
    surprisal: float = 0.0  # Σ −log μ
    by_group: PairsByGroup = field(default_factory=PairsByGroup)

    def add_pairs(self, pairs: TokenPairs, counting: Counting) -> None:
        equal, uncertain = pairs.mu == pairs.pi, pairs.mu < np.float32(_UNCERTAIN)
        uncertain_of_rows = row_sums(uncertain, pairs.offsets)
        copiable = uncertain_of_rows >= _LEAST_COPIED
        copied = equal & uncertain
        if np.count_nonzero(copied) >= _LEAST_COPIED:
            self.add(copied_rollouts=copiable & (row_sums(copied, pairs.offsets) == uncertain_of_rows))
        of_ratio = row_sums(pairs.ratio_minus_one, pairs.offsets)
        k3 = of_ratio - row_sums(np.minimum(pairs.d, np.float32(LARGEST_D)), pairs.offsets)
        self.add(tokens=equal.size, equal=equal, uncertain=uncertain, copiable_rollouts=copiable)
        self.add(k3=k3, surprisal=-pairs.mu.sum(dtype=np.float64))
        keys, prompts = counting.group_keys[pairs.rows], np.diff(counting.batch.prompt_offsets)[pairs.rows]
        self.by_group += PairsByGroup.of(keys, np.diff(pairs.offsets), of_ratio, k3, prompts)

    @property
    def copied(self) -> bool:
        """True if log π equals log μ at every token."""
        return self.tokens > 0 and self.equal == self.tokens

    @property
    def mean_k3(self) -> float:
        """The mean k3 of a token, in nats."""
        return self.k3 / self.tokens


def if_copied(judging: Judging) -> str:
    """Return why the two log-probs cannot be compared: one is a copy of the other, or missing; else an empty string."""
    if not judging[Pairs].tokens:
        return _NO_PAIRS
    return "the two log-probs are the same numbers" if judging[Pairs].copied else ""


def if_invalid(judging: Judging) -> str:
    """Return why the difference of the two log-probs is not a mismatch; an empty string if it is one."""
    return if_copied(judging) or next((why for name, why in _INVALIDATING.items() if judging.found(name)), "")


def if_shifted(judging: Judging) -> str:
    """Return why the ends of responses cannot be judged; an empty string if they can."""
    return "a shift leaves the ends without a value" if judging.found("shifted_log_probs") else ""


def _check_identical(judging: Judging) -> Outcome:
    pairs, uncertain = judging[Pairs], judging[Pairs].uncertain
    if not pairs.tokens:
        return NotChecked(_NO_PAIRS)
    if not pairs.copied:
        return _check_partly_copied(pairs)
    if uncertain < _LEAST_UNCERTAIN:
        return NotChecked(f"fewer than {_LEAST_UNCERTAIN} uncertain tokens: certain ones agree anyway")
    declared, rollouts = judging[Declared], judging[Rollouts].rollouts
    seen = (
        f"{pairs.tokens:,} of {pairs.tokens:,} differences are exactly 0, {uncertain:,} of them at tokens with log μ "
        f"below −0.01{'; bypass is declared' if declared.bypass == rollouts else ''}."
    )
    severity: Severity = "warning" if declared.policy == rollouts else "critical"
    return Finding(severity, seen, {"tokens": pairs.tokens, "uncertain_tokens": uncertain})


def _check_partly_copied(pairs: Pairs) -> Outcome:
    """Check for rollouts in which log π equals log μ at every uncertain token, beside others in which it does not."""
    copied, copiable = pairs.copied_rollouts, pairs.copiable_rollouts
    if copied < max(_LEAST_COPIED_ROLLOUTS, _COPIED_SHARE * copiable):
        return Clean()
    seen = f"{copied:,} of {copiable:,} rollouts have log π equal to log μ at every uncertain token; the others do not."
    return Finding("warning", seen, {"copied_rollouts": copied, "rollouts": copiable}, title=IDENTICAL.title_of_part)


IDENTICAL = Check(
    "identical_log_probs",
    "the two log-probs are the same numbers",
    "Every trainer-side measure is 0, whatever the mismatch is.",
    "If old_log_probs are set to rollout_log_probs (bypass), log the trainer's own recomputed ones at least every "
    "few steps. Ignore this only if the trainer is built to agree with its engine bit for bit.",
    _check_identical,
)
