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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.counting import EvidenceBuilder, Piece
from foreshock.lint.report import (
    FALSE_ALARM,
    LEAST_GROUPS,
    Clean,
    Finding,
    NotChecked,
    Outcome,
    format_number,
    format_signed_percent,
)
from foreshock.measures.estimators.intervals import student_t_quantile
from foreshock.rollouts.arrays import row_sums
from foreshock.rollouts.batch import RolloutBatch

if TYPE_CHECKING:
    from foreshock.lint.evidence import LintEvidence


# Below this temperature engines take the likeliest token and leave the log-probs unchanged (vLLM: _SAMPLING_EPS).
GREEDY = 1e-5


def count_sampling_parameters(batch: RolloutBatch, builder: EvidenceBuilder) -> None:
    """Count rollouts by declared sampling: the columns, else the batch attributes, else the engine's fingerprint."""
    values = {name: _declared(batch, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    temperature, top_p, top_k, min_p = (values[name] for name in ("temperature", "top_p", "top_k", "min_p"))
    # NaN (not declared) compares False: such a rollout counts as neither tempered nor truncated.
    with np.errstate(invalid="ignore"):
        tempered = (temperature != 1.0) & ~np.isnan(temperature)
        truncated = (top_p < 1.0) | (top_k > 0) | (min_p > 0.0)
        greedy = temperature < GREEDY
    shaped = tempered | truncated
    unknown = np.isnan(temperature) & np.isnan(top_p) & np.isnan(top_k) & np.isnan(min_p)
    fingerprint = batch.attributes.engine_fingerprint
    mode = batch.attributes.logprobs_mode or (None if fingerprint is None else fingerprint.logprobs_mode)
    raw = mode == "raw_logprobs"
    rollouts = batch.num_rollouts
    builder.count(
        declared_tempered=int(tempered.sum()),
        declared_truncated=int(truncated.sum()),
        declared_shaped=int(shaped.sum()),
        declared_plain=int((~shaped & ~np.isnan(temperature) & ~np.isnan(top_p)).sum()),
        sampling_unknown=int(unknown.sum()),
        mode_raw=rollouts if raw else 0,
        mode_processed=rollouts if mode == "processed_logprobs" else 0,
        mode_unknown=rollouts if mode is None else 0,
        raw_and_shaped=int(shaped.sum()) if raw else 0,
        processed_and_truncated=int(truncated.sum()) if mode == "processed_logprobs" else 0,
        shaped_mode_unknown=int(shaped.sum()) if mode is None else 0,
        unknown_repeat_chance=int((greedy if mode == "processed_logprobs" else shaped).sum()),
        declared_bypass=rollouts if batch.attributes.trainer_policy == "bypass" else 0,
        declared_policy=rollouts if batch.attributes.trainer_policy is not None else 0,
        versions_alone=(
            rollouts if batch.weights_version is not None and batch.attributes.trainer_weights_version is None else 0
        ),
    )
    if shaped.any():
        builder.raise_extremes(
            {
                "max_temperature": _largest(temperature),
                "minus_min_temperature": _largest(-temperature),
                "minus_min_top_p": _largest(-top_p),
                "minus_min_top_k": _largest(-top_k[top_k > 0]),
                "max_min_p": _largest(min_p),
            }
        )


def _declared(batch: RolloutBatch, name: str) -> NDArray[np.float64]:
    """Return a sampling parameter by rollout, shape [N]: its own, else the batch's, else the engine's, else NaN."""
    column = getattr(batch, name)
    value = getattr(batch.attributes, name)
    if value is None and batch.attributes.engine_fingerprint is not None:
        value = getattr(batch.attributes.engine_fingerprint, name)
    default = np.full(batch.num_rollouts, np.nan if value is None else float(value))
    return default if column is None else np.where(np.isnan(column), default, column)


def _largest(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.max(initial=-np.inf))


# Above this entropy, in nats, a distribution is broad: a few hundred tokens show its variance.
_BROAD = 0.5
# The range of the entropy of a distribution over tokens, in nats; below 0 by rounding only.
_LEAST_ENTROPY, _LARGEST_ENTROPY = -0.01, 100.0


def is_entropy(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return True for values that can be entropies, shape [T]; False for NaN."""
    return np.asarray((values >= _LEAST_ENTROPY) & (values <= _LARGEST_ENTROPY))


def sum_surprisals(piece: Piece, builder: EvidenceBuilder) -> NDArray[np.float64]:
    """Return Σ(−log μ − H) by rollout in nats, shape [N], over the tokens of a piece that have a valid entropy.

    Every log μ of the piece must be finite.
    """
    if piece.rollout is None or piece.entropy is None or piece.tokens == 0:
        return np.zeros(piece.offsets.size - 1)
    piece = piece.select(is_entropy(piece.entropy))
    entropy = piece.entropy
    assert entropy is not None
    assert piece.rollout is not None
    log_probs = row_sums(piece.rollout, piece.offsets)
    entropies = row_sums(entropy, piece.offsets)
    positive = np.maximum(entropy, np.float32(1e-30))
    # H² + 4H + H·log⁺(1/H)
    bound = positive * (positive + np.float32(4.0) - np.minimum(np.log(positive), np.float32(0.0)))
    broad = np.flatnonzero(entropy > np.float32(_BROAD))
    builder.count(surprisal_tokens=piece.tokens, broad_tokens=broad.size)
    of_broad = float(bound[broad].sum(dtype=np.float64))
    builder.add(
        surprisal=-float(log_probs.sum()),
        entropy=float(entropies.sum()),
        sharp_bound=float(bound.sum(dtype=np.float64)) - of_broad,
        broad_bound=of_broad,
        broad_squares=float(np.square(piece.rollout[broad] + entropy[broad]).sum(dtype=np.float64)),
    )
    builder.raise_extremes({"largest_surprisal": -float(piece.rollout.min(initial=0.0))})
    return -log_probs - entropies


_CHECK = "raw_log_probs"
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
        return cls(
            tokens=evidence.count("surprisal_tokens"),
            surprisal=evidence.sum("surprisal"),
            entropy=evidence.sum("entropy"),
            variance=_variance(evidence),
            largest=evidence.extreme("largest_surprisal"),
            clusters=evidence.groups.keys.size,
            z=evidence.groups.z_of_zero("surprisal"),
        )

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


def check_surprisal(sums: SurprisalSums) -> Finding | Clean | NotChecked:
    """Return the outcome of the surprisal test alone."""
    if not sums.tokens:
        return NotChecked(_CHECK, "the surprisal test needs rollout_log_probs and entropy")
    if sums.clusters < LEAST_GROUPS:
        return NotChecked(_CHECK, f"the surprisal test needs {LEAST_GROUPS} {sums.unit}, and there are {sums.clusters}")
    needed = math.sqrt(-2.0 * math.log(FALSE_ALARM))
    if not sums.variance > 0 or _DETECTABLE_SHARE * sums.entropy < needed * math.sqrt(sums.variance):
        return NotChecked(
            _CHECK,
            f"the surprisal test needs more tokens: {sums.tokens:,} with {format_number(sums.entropy)} nats of entropy "
            "do not suffice",
        )
    excess = sums.surprisal - sums.entropy
    agrees = math.isnan(sums.t) or abs(sums.t) >= student_t_quantile(1 - _CLUSTERED_CHANCE / 2, sums.clusters - 1)
    if abs(excess) < _LEAST_SHARE * sums.entropy or sums.log_chance() > math.log(FALSE_ALARM) or not agrees:
        return Clean(_CHECK)
    ratio = sums.surprisal / sums.entropy
    base = [f" (or {words})" for words, factor in _BASES.items() if abs(ratio / factor - 1.0) <= _BASE_NEAR]
    meaning = (
        "the sampled tokens are likelier than the logged μ predicts: truncation, or a temperature below 1"
        if excess < 0
        else "the sampled tokens are less likely than the logged μ predicts: a temperature above 1, or the entropy of "
        "another distribution"
    )
    seen = (
        f"−log μ averages {format_number(sums.surprisal / sums.tokens)} nats over {sums.tokens:,} tokens, the entropy "
        f"{format_number(sums.entropy / sums.tokens)} ({format_signed_percent(excess / sums.entropy)}); surprisal_z "
        f"{format_number(sums.z)} over {sums.clusters:,} {sums.unit}; {meaning}{''.join(base)}."
    )
    return Finding(_CHECK, "critical", seen, sums.numbers())


def sums_for_run(evidence: LintEvidence) -> SurprisalSums:
    """Return the sums of a step for the test over its run: those of μ or of π, whichever fit the entropy better.

    Trainers log the entropy of π. With a lag it differs from that of μ, in the same direction at every step.
    """
    sums = SurprisalSums.of(evidence)
    excess, of_target = sums.surprisal - sums.entropy, target_excess(evidence) * sums.entropy
    return replace(sums, surprisal=sums.entropy + of_target) if abs(of_target) < abs(excess) else sums


def target_excess(evidence: LintEvidence) -> float:
    """Return Σ(−ρ·log π − H) / Σ H: near 0 if H is the entropy of π and μ sampled the tokens; NaN if not estimable."""
    entropy = evidence.sum("target_entropy")
    return evidence.sum("target_surprisal") / entropy - 1.0 if entropy > 0 else math.nan


def _variance(evidence: LintEvidence) -> float:
    """Return the bound of the variance of Σ −log μ, in nats²; see the module docstring."""
    of_broad = evidence.sum("broad_bound")
    if evidence.count("broad_tokens") >= _LEAST_BROAD_TOKENS:
        of_broad = max(evidence.sum("broad_squares"), _LEAST_PART_OF_BOUND * of_broad)
    return max(evidence.sum("sharp_bound"), 0.0) + of_broad


# The entropy is that of π if π fits it this much better than μ does.
_SHARE_OF_TARGET = 1.0 / 3.0
# Raw log-probs leave ρ near 1, so that μ and π fit the entropy equally badly. Below this, π fits it much better: then
# the data do not show if the log-probs or the entropy are wrong.
_SHARE_OF_BOTH = 0.75


def check_sampling(evidence: LintEvidence, *, unreliable: str = "", covered: bool = True) -> tuple[Outcome, Outcome]:
    """Check for raw log-probs under temperature or truncation, and for an entropy of π instead of μ.

    `unreliable` is the reason why the surprisal test cannot be made. `covered` is False if mean ρ is known to be off 1.
    """
    sums = SurprisalSums.of(evidence)
    other: Outcome = Clean("entropy_of_trainer")
    if unreliable or not evidence.sum("target_entropy") > 0:
        why = unreliable if evidence.sum("target_entropy") > 0 else "needs both log-probs and entropy"
        other = NotChecked("entropy_of_trainer", why)
    tested: Finding | Clean | NotChecked = check_surprisal(sums)
    if unreliable:
        tested = NotChecked(_CHECK, unreliable)
    elif isinstance(tested, Finding) and covered:
        if found := _entropy_of_trainer(evidence, sums):
            tested, other = NotChecked(_CHECK, "`entropy` is that of π and not of μ"), found
        elif target_excess(evidence) / (sums.surprisal / sums.entropy - 1.0) < _SHARE_OF_BOTH:
            tested = NotChecked(_CHECK, "`entropy` fits neither μ nor π, which are far apart: log that of μ")
    plain = evidence.count("sampling_unknown") == 0 and evidence.count("declared_shaped") == 0
    if plain and isinstance(tested, Finding) and not any(base in tested.seen for base in _BASES):
        tested, other = _contradiction(tested)
    if declared := evidence.count("raw_and_shaped"):
        result = "; the surprisal test does not show it" if isinstance(tested, Clean) else ""
        if isinstance(tested, Finding):
            result = f"; {tested.seen.rstrip('.')}"
        seen = (
            f"{declared:,} of {evidence.count('rollouts'):,} rollouts were sampled with {_parameters(evidence)}, and "
            f"the engine logs raw_logprobs, before these are applied{result}."
        )
        return Finding(_CHECK, "critical", seen, sums.numbers()), other
    if unreliable or not isinstance(tested, NotChecked) or isinstance(other, Finding):
        return tested, other
    if evidence.count("shaped_mode_unknown"):
        why = f"sampled with {_parameters(evidence)}, and logprobs_mode is not declared; {tested.why}"
        return NotChecked(_CHECK, why), other
    if plain or evidence.count("mode_processed") == evidence.count("rollouts"):
        return Clean(_CHECK, f"by the declared sampling only; {tested.why}"), other
    return tested, other


def _contradiction(found: Finding) -> tuple[NotChecked, Finding]:
    """Return what the surprisal test means if all rollouts are declared as plain samples: raw log-probs are then μ."""
    seen = (
        f"{found.seen.rstrip('.')}; but temperature 1 without truncation is declared. Either `entropy` is that of "
        "another distribution, or the engine did not sample as declared (vLLM applies a model's generation_config)."
    )
    title = "`entropy` contradicts the declared sampling"
    return NotChecked(_CHECK, title), Finding("entropy_of_trainer", "warning", seen, found.evidence, title=title)


def check_declaration(evidence: LintEvidence, raw: Outcome) -> Outcome:
    """Check if neither the declaration nor the entropies show whether the logged μ is the sampling distribution."""
    check, rollouts = "sampling_not_declared", evidence.count("rollouts")
    if not evidence.count("rollout_logged"):
        return NotChecked(check, "needs rollout_log_probs")
    shaped = evidence.count("declared_shaped")
    unknown = evidence.count("mode_unknown") and (evidence.count("sampling_unknown") or shaped)
    if not unknown or not isinstance(raw, NotChecked) or evidence.count("surprisal_tokens"):
        return Clean(check)
    seen = f"{rollouts:,} rollouts have no declared logprobs_mode, and no entropies."
    if shaped:
        seen = f"{shaped:,} rollouts were sampled with {_parameters(evidence)}, without logprobs_mode and entropies."
    return Finding(check, "info", seen, {"rollouts": rollouts})


def check_lag(evidence: LintEvidence) -> Outcome:
    """Check if the lag is unknown although the versions that sampled are logged."""
    alone = evidence.count("versions_alone")
    if not alone:
        return Clean("lag_unknown")
    seen = f"{alone:,} rollouts have a weights_version, and no trainer_weights_version is declared."
    return Finding("lag_unknown", "info", seen, {"rollouts": alone})


def _entropy_of_trainer(evidence: LintEvidence, sums: SurprisalSums) -> Finding | None:
    """Return a finding if −log μ differs from the entropy and −log π, weighted by ρ, does not."""
    share, of_target = sums.surprisal / sums.entropy - 1.0, target_excess(evidence)
    if not abs(of_target) <= _SHARE_OF_TARGET * abs(share):
        return None
    seen = (
        f"−log μ averages {format_number(sums.surprisal / sums.tokens)} nats, the entropy "
        f"{format_number(sums.entropy / sums.tokens)} ({format_signed_percent(share)}); −log π weighted by ρ differs "
        f"from the entropy by only {format_signed_percent(of_target)}."
    )
    numbers = {"share_of_mu": share, "share_of_pi": of_target, "tokens": sums.tokens}
    return Finding("entropy_of_trainer", "warning", seen, numbers)


def _parameters(evidence: LintEvidence) -> str:
    """Return the declared sampling parameters that differ from plain sampling, such as `temperature 0.7, top-p 0.9`."""
    parts = []
    low, high = -evidence.extreme("minus_min_temperature"), evidence.extreme("max_temperature")
    if evidence.count("declared_tempered"):
        parts.append(f"temperature {format_number(low)}" + (f" to {format_number(high)}" if high > low else ""))
    top_p, top_k = -evidence.extreme("minus_min_top_p"), -evidence.extreme("minus_min_top_k")
    if top_p < 1:
        parts.append(f"top-p {format_number(top_p)}")
    if math.isfinite(top_k) and top_k > 0:
        parts.append(f"top-k {format_number(top_k)}")
    if evidence.extreme("max_min_p") > 0:
        parts.append(f"min-p {format_number(evidence.extreme('max_min_p'))}")
    return ", ".join(parts) or "shaped sampling"
