"""Check if the logged μ is the sampling distribution, by the declared sampling and by the surprisal test.

If the logged μ is the sampling distribution, Σ(−log μ(a) − H(μ)) is a martingale: its mean is 0 for any text. Log-probs
taken before temperature or truncation leave every ratio ρ unchanged, and only this sum is off.

The size of its chance deviations needs the variance of s = −log μ(a), which is not logged. The sample variance can be
far too small: if a policy is sharp, rare tokens carry nearly all of the variance, and a batch may contain none of them.
For H ≤ 0.5, E[s²] is therefore computed from the entropy: ≈ H·(H + 4 + log⁺(1/H)), the value for one likely token and a
dozen unlikely ones. As s ≥ 0, P(Σ(H − s) ≥ x) ≤ exp(−x²/2V) with V = Σ E[s²], for any dependence on the past (Maurer
2003, "A bound on the deviation probability for sums of non-negative random variables"; the proof also holds for
martingales). If a policy is broad, no single token matters, and the sample variance is used from 500 tokens on.

The service also applies the test to all steps of a run together.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.checks.declared import Declared
from foreshock.lint.checks.pairs import OF_BEHAVIOUR, Pairs
from foreshock.lint.checks.responses import Rollouts
from foreshock.lint.checks.values import RolloutValues
from foreshock.lint.counting import Bools, Counting, Counts, Floats, Piece, Table, TokenPairs, largest
from foreshock.lint.evidence import LintEvidence
from foreshock.lint.judging import (
    FALSE_ALARM,
    LEAST_GROUPS,
    Check,
    Clean,
    Finding,
    Judging,
    NotChecked,
    Outcome,
    format_number,
    format_signed_percent,
)
from foreshock.measures.estimators.intervals import student_t_quantile
from foreshock.rollouts.arrays import row_sums

# Above this entropy, in nats, a distribution is broad: a few hundred tokens show its variance.
_BROAD = 0.5
# The range of the entropy of a distribution over tokens, in nats; below 0 by rounding only.
_LEAST_ENTROPY, _LARGEST_ENTROPY = -0.01, 100.0
# A difference below this share of the entropy may be that between μ and π, if the entropy of π was logged.
_LEAST_SHARE = 0.02
# The clustered test only has to agree: the bound that does not rely on the sample variance decides.
_CLUSTERED_CHANCE = 0.01
# The sample must be large enough to show a surprisal that is a fifth too small (top-p 0.9).
_DETECTABLE_SHARE = 0.2
_LARGEST_SURPRISAL = 12.0
# The ratio of surprisal to entropy if one of the two is in another base.
_BASES = {
    "log-probs in base 2": 1.0 / math.log(2),
    "log-probs in base 10": 1.0 / math.log(10),
    "an entropy in bits": math.log(2),
}
_BASE_NEAR = 0.02
# From this many broad tokens on, their sample variance is used, but at least this part of the bound.
_LEAST_BROAD_TOKENS = 500
_LEAST_PART_OF_BOUND = 0.125
# The entropy is that of π if π fits it this much better than μ does.
_SHARE_OF_TARGET = 1.0 / 3.0
# Raw log-probs leave ρ near 1, so that μ and π fit the entropy equally badly. Below this, π fits it much better: then
# the data do not show if the log-probs or the entropy are wrong.
_SHARE_OF_BOTH = 0.75
_MOST_WITHOUT = 1e-3


class SurprisalByGroup(Table):
    """Σ(−log μ − H) in nats by prompt group."""

    COLUMNS = ("excess",)


@dataclass
class Surprisal(Counts):
    """The generated tokens with a valid log μ and a valid entropy, in nats."""

    tokens: int = 0
    broad_tokens: int = 0  # of these: with an entropy above 0.5
    surprisal: float = 0.0  # Σ −log μ
    entropy: float = 0.0  # Σ H
    sharp_bound: float = 0.0  # Σ of the bound of E[(−log μ)²] over tokens with an entropy of at most 0.5
    broad_bound: float = 0.0  # the same at entropies above 0.5
    broad_squares: float = 0.0  # Σ (−log μ − H)² at entropies above 0.5
    target_surprisal: float = 0.0  # Σ ρ·(−log π), over tokens with two finite log-probs and an entropy
    target_entropy: float = 0.0  # Σ H over the same tokens
    largest: float = largest()
    by_group: SurprisalByGroup = field(default_factory=SurprisalByGroup)

    def add_piece(self, piece: Piece, counting: Counting) -> None:
        excess = np.zeros(piece.offsets.size - 1)
        if {"rollout", "entropy"} <= piece.columns.keys():
            excess = self._add_tokens(piece.select(piece.valid("rollout")))
        self.by_group += SurprisalByGroup.of(counting.group_keys[piece.rows], excess)

    def add_pairs(self, pairs: TokenPairs, counting: Counting) -> None:
        if pairs.entropy is not None and _is_entropy(pairs.entropy).all():
            target = (pairs.ratio_minus_one * pairs.pi).sum() + pairs.pi.sum(dtype=np.float64)
            self.add(target_surprisal=-float(target), target_entropy=pairs.entropy)

    def _add_tokens(self, scored: Piece) -> NDArray[np.float64]:
        """Count the tokens with a valid entropy of a piece; return Σ(−log μ − H) by rollout, [N]."""
        piece = scored.select(_is_entropy(scored.columns["entropy"]))
        rollout, entropy = piece.columns["rollout"], piece.columns["entropy"]
        log_probs, entropies = row_sums(rollout, piece.offsets), row_sums(entropy, piece.offsets)
        positive = np.maximum(entropy, np.float32(1e-30))
        # H² + 4H + H·log⁺(1/H)
        bound = positive * (positive + np.float32(4.0) - np.minimum(np.log(positive), np.float32(0.0)))
        broad = np.flatnonzero(entropy > np.float32(_BROAD))
        of_broad = float(bound[broad].sum(dtype=np.float64))
        self.add(tokens=rollout.size, broad_tokens=broad.size, surprisal=-log_probs, entropy=entropies)
        self.add(sharp_bound=float(bound.sum(dtype=np.float64)) - of_broad, broad_bound=of_broad)
        self.add(broad_squares=np.square(rollout[broad] + entropy[broad]), largest=-float(rollout.min(initial=0.0)))
        return -log_probs - entropies

    @property
    def variance(self) -> float:
        """The bound of the variance of Σ −log μ, in nats²; see the module docstring."""
        of_broad = self.broad_bound
        if self.broad_tokens >= _LEAST_BROAD_TOKENS:
            of_broad = max(self.broad_squares, _LEAST_PART_OF_BOUND * of_broad)
        return max(self.sharp_bound, 0.0) + of_broad

    @property
    def z(self) -> float:
        """Σ_g S_g / √(Σ_g S_g²) of the sums by prompt group: the z score against a mean of 0."""
        values = self.by_group.column("excess")
        square = float(np.square(values).sum())
        return float(values.sum()) / math.sqrt(square) if 0.0 < square < math.inf else math.nan

    @property
    def target_excess(self) -> float:
        """Σ(−ρ·log π − H) / Σ H: near 0 if H is the entropy of π and μ sampled the tokens; NaN if not estimable."""
        return self.target_surprisal / self.target_entropy - 1.0 if self.target_entropy > 0 else math.nan


def _is_entropy(values: Floats) -> Bools:
    """Return True for values that can be entropies, shape [T]; False for NaN."""
    return np.asarray((values >= _LEAST_ENTROPY) & (values <= _LARGEST_ENTROPY))


@dataclass(frozen=True, slots=True)
class SurprisalSums:
    """Σ −log μ, Σ H and a bound of the variance over `tokens`, in nats, with the clustered z score.

    `z` is Σ_c S_c / √(Σ_c S_c²) of S = Σ(−log μ − H) over `clusters` independent parts: prompt groups, or steps.
    """

    tokens: int
    surprisal: float
    entropy: float
    variance: float
    largest: float
    clusters: int
    z: float
    unit: str = "prompt groups"

    @classmethod
    def of(cls, evidence: LintEvidence) -> SurprisalSums:
        """Return the sums of a batch or a step, clustered by prompt group."""
        of = evidence[Surprisal]
        return cls(of.tokens, of.surprisal, of.entropy, of.variance, of.largest, of.by_group.keys.size, of.z)

    @property
    def share(self) -> float:
        """The excess of the surprisal over the entropy, as a share of the entropy."""
        return self.surprisal / self.entropy - 1.0

    @property
    def t(self) -> float:
        """Student's t of z, with clusters − 1 degrees of freedom; ±inf if all clusters have the same sum."""
        if self.clusters < 2 or math.isnan(self.z):
            return math.nan
        left = self.clusters - self.z * self.z
        if left <= 1e-12 * self.clusters:
            return math.copysign(math.inf, self.z)
        return self.z * math.sqrt((self.clusters - 1) / left)

    def log_chance(self) -> float:
        """Return an upper bound of the log-probability of such an excess if the logged μ sampled the tokens.

        The bound of the module docstring is for a surprisal below the entropy. Above it, Bernstein's inequality with
        the largest surprisal seen is used.
        """
        excess, variance = self.surprisal - self.entropy, self.variance
        if excess > 0:
            variance += max(_LARGEST_SURPRISAL, self.largest) * excess / 3.0
        return -excess * excess / (2.0 * variance)

    def numbers(self) -> dict[str, float]:
        """Return the numbers of a finding by name; empty if there are no tokens."""
        if not self.tokens:
            return {}
        return {
            "tokens": self.tokens,
            "mean_surprisal": self.surprisal / self.tokens,
            "mean_entropy": self.entropy / self.tokens,
            "surprisal_z": self.z,
            self.unit.replace(" ", "_"): self.clusters,
        }


def check_surprisal(sums: SurprisalSums) -> Outcome:
    """Return the outcome of the surprisal test alone."""
    if not sums.tokens:
        return NotChecked("the surprisal test needs rollout_log_probs and entropy")
    if sums.clusters < LEAST_GROUPS:
        return NotChecked(f"the surprisal test needs {LEAST_GROUPS} {sums.unit}, and there are {sums.clusters}")
    needed = math.sqrt(-2.0 * math.log(FALSE_ALARM))
    if not sums.variance > 0 or _DETECTABLE_SHARE * sums.entropy < needed * math.sqrt(sums.variance):
        return NotChecked(
            f"the surprisal test needs more tokens: {sums.tokens:,} with {format_number(sums.entropy)} nats of entropy "
            "do not suffice",
        )
    excess = sums.surprisal - sums.entropy
    agrees = math.isnan(sums.t) or abs(sums.t) >= student_t_quantile(1 - _CLUSTERED_CHANCE / 2, sums.clusters - 1)
    if abs(excess) < _LEAST_SHARE * sums.entropy or sums.log_chance() > math.log(FALSE_ALARM) or not agrees:
        return Clean()
    ratio = sums.surprisal / sums.entropy
    base = [f" (or {words})" for words, factor in _BASES.items() if abs(ratio / factor - 1.0) <= _BASE_NEAR]
    meaning = (
        "the sampled tokens are likelier than the logged entropy predicts: truncation, or a temperature below 1"
        if excess < 0
        else "the sampled tokens are less likely than the logged entropy predicts: a temperature above 1, or the "
        "entropy of another distribution"
    )
    seen = (
        f"−log μ averages {format_number(sums.surprisal / sums.tokens)} nats over {sums.tokens:,} tokens, the entropy "
        f"{format_number(sums.entropy / sums.tokens)} ({format_signed_percent(excess / sums.entropy)}); surprisal_z "
        f"{format_number(sums.z)} over {sums.clusters:,} {sums.unit}; {meaning}{''.join(base)}."
    )
    return Finding("critical", seen, sums.numbers())


def sums_for_run(evidence: LintEvidence) -> SurprisalSums:
    """Return the sums of a step for the test over its run: those of μ or of π, whichever fit the entropy better.

    Trainers log the entropy of π. With a lag it differs from that of μ, in the same direction at every step.
    """
    sums = SurprisalSums.of(evidence)
    excess, of_target = sums.surprisal - sums.entropy, evidence[Surprisal].target_excess * sums.entropy
    return replace(sums, surprisal=sums.entropy + of_target) if abs(of_target) < abs(excess) else sums


def unreliable_surprisal(evidence: LintEvidence, found: Collection[str]) -> str:
    """Return why the surprisal test is invalid, given the names of the findings; an empty string if it is valid."""
    if "processed_log_probs" in found:
        return "the log-probs are processed, and `entropy` may be that of the distribution before processing"
    if why := next((why for name, why in OF_BEHAVIOUR.items() if name in found), ""):
        return why
    if "tokens_not_sampled" in found:
        return "the model did not sample some of the tokens"
    # The tokens without a log μ may all be ends of sequences: the remaining tokens are then a biased sample.
    values = evidence[RolloutValues]
    too_many = values.non_finite + values.placeholders > _MOST_WITHOUT * values.logged
    return "too many tokens have no log μ" if too_many else ""


def _unreliable(judging: Judging) -> str:
    names = ("processed_log_probs", "tokens_not_sampled", *OF_BEHAVIOUR)
    return unreliable_surprisal(judging.evidence, [name for name in names if judging.found(name)])


def _test(judging: Judging) -> tuple[Outcome, Outcome]:
    """Return the outcomes of the surprisal test: whether μ is the sampling distribution, and the entropy that of μ."""
    counts, sums, declared = judging[Surprisal], SurprisalSums.of(judging.evidence), judging[Declared]
    rollouts, of_target = judging[Rollouts].rollouts, counts.target_excess
    other: Outcome = Clean() if counts.target_entropy > 0 else NotChecked("needs both log-probs and entropy")
    if why := _unreliable(judging):
        return NotChecked(why), NotChecked(why) if isinstance(other, Clean) else other
    raw = check_surprisal(sums)
    if not isinstance(raw, Finding):
        return raw, other
    # If mean ρ is off 1, importance weights do not tell μ from π.
    if not (judging.found("mean_ratio") or judging.found("processed_log_probs")):
        if abs(of_target) <= _SHARE_OF_TARGET * abs(sums.share):
            seen = (
                f"−log μ averages {format_number(sums.surprisal / sums.tokens)} nats, the entropy "
                f"{format_number(sums.entropy / sums.tokens)} ({format_signed_percent(sums.share)}); −log π weighted "
                f"by ρ differs from the entropy by only {format_signed_percent(of_target)}."
            )
            numbers = {"share_of_mu": sums.share, "share_of_pi": of_target, "tokens": sums.tokens}
            of_trainer: Outcome = Finding("warning", seen, numbers)
            if declared.entropy_of_trainer == rollouts:
                of_trainer = Clean("as declared")
            return NotChecked(ENTROPY_OF_TRAINER.title), of_trainer
        if of_target / sums.share < _SHARE_OF_BOTH:
            return NotChecked("`entropy` fits neither μ nor π, which are far apart: log that of μ"), other
    if declared.is_plain and not any(base in raw.seen for base in _BASES):
        # Raw log-probs of plain samples are μ.
        untruncated = " without truncation" if declared.plain == rollouts else ""
        seen = f"{raw.seen.rstrip('.')}; but temperature 1{untruncated} is declared"
        if declared.entropy_of_engine == rollouts:
            seen += f", and `entropy` as the engine's. The engine {_AS_DECLARED}, and logs other log-probs."
            return replace(raw, seen=seen, title=_NOT_AS_DECLARED, remedy=_COMPARE), other
        seen += f". Either `entropy` is that of another distribution, or the engine {_AS_DECLARED}."
        remedy = (
            f"{_COMPARE} If they agree, `entropy` is that of another distribution: if it is the trainer's, declare it "
            '(batch attribute entropy_policy="trainer").'
        )
        return NotChecked(_CONTRADICTION), Finding("warning", seen, raw.evidence, title=_CONTRADICTION, remedy=remedy)
    mean_above_one, _ = judging[Pairs].by_group.mean_and_t("ratio_minus_one")
    if mean_above_one < 0.0 and judging.found("mean_ratio"):
        # The mean is 1 if the trainer leaves out temperature and truncation too, and above 1 if it applies them.
        return NotChecked("mean ρ is below 1, which raw log-probs do not make"), other
    return raw, other


def _check_raw(judging: Judging) -> Outcome:
    declared, rollouts = judging[Declared], judging[Rollouts].rollouts
    tested, other = _test(judging)
    if declared.raw_and_shaped:
        result = "; the surprisal test does not show it" if isinstance(tested, Clean) else ""
        if isinstance(tested, Finding):
            result = f"; {tested.seen.rstrip('.')}"
        seen = (
            f"{declared.raw_and_shaped:,} of {rollouts:,} rollouts were sampled with {declared.parameters}, and the "
            f"engine logs raw_logprobs, before these are applied{result}."
        )
        return Finding("critical", seen, SurprisalSums.of(judging.evidence).numbers())
    if _unreliable(judging) or not isinstance(tested, NotChecked) or isinstance(other, Finding):
        return tested
    if declared.shaped_mode_unknown:
        return NotChecked(f"sampled with {declared.parameters}, and logprobs_mode is not declared; {tested.why}")
    if declared.is_plain or declared.mode_processed == rollouts:
        return Clean(f"{BY_DECLARATION}; {tested.why}")
    return tested


def _check_declared(judging: Judging) -> Outcome:
    declared, rollouts = judging[Declared], judging[Rollouts].rollouts
    if not judging[RolloutValues].logged:
        return NotChecked("needs rollout_log_probs")
    unknown = declared.mode_unknown and (declared.sampling_unknown or declared.shaped)
    raw = judging.outcome("raw_log_probs")
    if not unknown or not isinstance(raw, NotChecked) or judging[Surprisal].tokens:
        return Clean()
    seen = f"{rollouts:,} rollouts have no declared logprobs_mode, and no entropies."
    if declared.shaped:
        shaped = f"{declared.shaped:,} rollouts were sampled with {declared.parameters}"
        seen = f"{shaped}, without logprobs_mode and entropies."
    return Finding("info", seen, {"rollouts": rollouts})


BY_DECLARATION: Final = "by the declared sampling only"
"""How the reason begins for which the logged μ counts as the sampling distribution without a test."""

_CONTRADICTION = "`entropy` contradicts the declared sampling"
_NOT_AS_DECLARED = "the engine did not sample as declared: the logged μ is not the sampling distribution"
_AS_DECLARED = "did not sample as declared (vLLM applies a model's generation_config)"
_COMPARE = (
    "Compare the temperature, top_p, top_k, min_p and penalties that the engine used (its request log, the model's "
    "generation_config.json) with what is declared."
)

RAW = Check(
    "raw_log_probs",
    "the logged μ is not the sampling distribution (raw log-probs under temperature or truncation)",
    "Every ratio looks perfect or is biased: KL, χ² and ESS are those of a policy that did not sample the tokens.",
    "Let the engine log the sampling distribution (vLLM: logprobs_mode=processed_logprobs) and apply the same "
    "temperature in the trainer, or sample at temperature 1 without truncation. Also check that `entropy` is that "
    "of the same distribution as log μ.",
    _check_raw,
)
ENTROPY_OF_TRAINER = Check(
    "entropy_of_trainer",
    "the logged entropy is the trainer's, not the engine's",
    "surprisal_z and the maps by entropy are of another distribution; all other measures are valid.",
    'Declare it (batch attribute entropy_policy="trainer"), or log the engine\'s entropy.',
    lambda judging: _test(judging)[1],
    explains=False,
    auxiliary=True,
)
NOT_DECLARED = Check(
    "sampling_not_declared",
    "it cannot be told if the logged μ sampled the tokens",
    "If log μ is taken before temperature or truncation, every ratio looks perfect.",
    "Declare temperature, top_p, top_k and logprobs_mode (batch attributes), or log the engine's entropy.",
    _check_declared,
)
